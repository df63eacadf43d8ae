"""A pool's objects: one headless service, and a StatefulSet per replica with a pod per node.

One container per pod holds all NPUs of the node that the replica uses (MindCluster schedules NPUs to one
container of a pod) and runs every engine that the topology places there. When one engine ends, the container
ends, and the kubelet starts all of them again: an engine never outlives its neighbours with stale ports.

Facts: MindCluster's object table (labels `accelerator`, `accelerator-type`, `ring-controller.atlas`, annotation
`sp-block`, `pod-rescheduling`), host paths of the Ascend driver, seccomp left at the runtime's default.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from ascend_pd.manifests.objects import (
    IMAGE_GROUP,
    Object,
    config_mount,
    config_volume,
    http_probe,
    labels,
    metadata,
    secret_volumes,
)
from ascend_pd.manifests.placement import devices_per_pod, pool_service, replica_name
from ascend_pd.manifests.settings import SPEC_PATH, ManifestSettings
from ascend_pd.models.hardware import CATALOGUE
from ascend_pd.spec.cluster import EMBEDDED_MODEL, Hardware, PDCluster, PoolSpec
from ascend_pd.spec.topology import Replica, Topology

START_LIMIT_S = 3600
"""Loading hundreds of gigabytes of weights and compiling graphs."""
GRACE_S = 60
HOST_FILES = {
    "driver": ("/usr/local/Ascend/driver", "Directory"),
    "dcmi": ("/usr/local/dcmi", "Directory"),
    "npu-smi": ("/usr/local/bin/npu-smi", "File"),
    "hccn-conf": ("/etc/hccn.conf", "File"),
    "install-info": ("/etc/ascend_install.info", "File"),
}
"""Mounted read-only from the node into NPU pods."""


def pool_objects(cluster: PDCluster, topology: Topology, index: int, settings: ManifestSettings) -> list[Object]:
    """The service of a pool and the StatefulSets of its replicas."""
    name, pool = cluster.metadata.name, cluster.spec.pools[index]
    of = labels(name, "engine", **{"ascend-pd/pool": pool.name})
    headless = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(settings, pool_service(name, pool.name), of),
        # Engines of a replica meet each other before any of them is ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": of},
    }
    replicas = [r for r in topology.replicas if r.pool_index == index]
    return [headless, *(_stateful_set(cluster, pool, replica, of, settings) for replica in replicas)]


def _stateful_set(
    cluster: PDCluster, pool: PoolSpec, replica: Replica, of: dict[str, str], settings: ManifestSettings
) -> Object:
    own = {**of, "ascend-pd/replica": str(replica.index)}
    name = cluster.metadata.name
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(settings, replica_name(name, pool.name, replica.index), own),
        "spec": {
            "serviceName": pool_service(name, pool.name),
            "replicas": len(replica.hosts),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": own},
            "template": {
                "metadata": {"labels": {**own, **_npu_labels(pool)}, **_annotations(pool)},
                "spec": _pod(cluster, pool, replica, settings),
            },
        },
    }


def _npu_labels(pool: PoolSpec) -> dict[str, str]:
    if pool.hardware is Hardware.CPU:
        return {}
    return {
        "ring-controller.atlas": "ascend-910b",
        "fault-scheduling": "grace",
        "fault-retry-times": "10000",
        "pod-rescheduling": "on",
    }


def _annotations(pool: PoolSpec) -> Object:
    if pool.hardware is not Hardware.A3:
        return {}
    return {"annotations": {"sp-block": str(pool.parallel.world_size)}}


def _pod(cluster: PDCluster, pool: PoolSpec, replica: Replica, settings: ManifestSettings) -> Object:
    volumes, mounts = _volumes(cluster, pool, settings)
    npu = pool.hardware is not Hardware.CPU
    resources: Object = {}
    if npu:
        count = {settings.npu_resource: devices_per_pod(pool)}
        resources = {"resources": {"requests": count, "limits": count}}
    container = {
        "name": "engines",
        "image": settings.image(pool.hardware),
        "command": ["/bin/bash", "-c", start_script(replica)],
        "ports": [{"name": "http", "containerPort": pool.port}],
        **resources,
        **_probes(pool, replica),
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": mounts,
    }
    placing: Object = {}
    if npu:
        kind = settings.accelerator_type or CATALOGUE[pool.hardware].accelerator_type
        selector = {"accelerator": "huawei-Ascend910", "accelerator-type": kind}
        placing = {"schedulerName": settings.scheduler, "nodeSelector": selector}
    return {
        **placing,
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "securityContext": {"fsGroup": IMAGE_GROUP},
        "containers": [container],
        "volumes": volumes,
    }


def _probes(pool: PoolSpec, replica: Replica) -> Object:
    if any(replica.master_port(engine.dp_rank) for engine in replica.engines):
        # Only an engine's first node answers HTTP, and all pods of the set share one template.
        return {}
    return {
        "startupProbe": http_probe(pool.port, "/health", every_s=10, failures=START_LIMIT_S // 10),
        "readinessProbe": http_probe(pool.port, "/health", every_s=5, failures=3),
        "livenessProbe": http_probe(pool.port, "/health", every_s=15, failures=8),
    }


def start_script(replica: Replica) -> str:
    """Start this pod's engines, by the number at the end of its name; end when one of them ends."""
    cases = []
    for number, host in enumerate(replica.hosts):
        words = [
            f"{engine.dp_rank}:{node}"
            for engine in replica.engines
            for node, at in enumerate(dict.fromkeys(worker.host for worker in engine.workers))
            if at == host
        ]
        cases.append(f"  {number}) engines='{' '.join(words)}' ;;")
    return "\n".join(
        [
            'case "${HOSTNAME##*-}" in',
            *cases,
            '  *) echo "unknown pod $HOSTNAME" >&2; exit 2 ;;',
            "esac",
            "trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' TERM INT",
            "for engine in $engines; do",
            f"  ascend-pd engine {SPEC_PATH} --pool {replica.pool} --replica {replica.index} \\",
            '    --dp-rank "${engine%:*}" --node "${engine#*:}" &',
            "done",
            "wait -n; code=$?",
            "kill $(jobs -p) 2>/dev/null; wait",
            "exit $((code ? code : 1))",
            "",
        ]
    )


def _volumes(cluster: PDCluster, pool: PoolSpec, settings: ManifestSettings) -> tuple[list[Object], list[Object]]:
    volumes: list[Object] = [config_volume(cluster.metadata.name)]
    mounts: list[Object] = [config_mount()]
    secrets, secret_mounts = secret_volumes(cluster, "engine")
    volumes += secrets
    mounts += secret_mounts
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm_size}})
    mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    path = pool.overrides.model_path or cluster.spec.model.path
    if path != EMBEDDED_MODEL:
        volumes.append({"name": "model", **_model_source(path, settings)})
        mounts.append({"name": "model", "mountPath": str(PurePosixPath(path)), "readOnly": True})
    if pool.hardware is not Hardware.CPU:
        for name, (place, kind) in HOST_FILES.items():
            volumes.append({"name": name, "hostPath": {"path": place, "type": kind}})
            mounts.append({"name": name, "mountPath": place, "readOnly": True})
    return volumes, mounts


def _model_source(path: str, settings: ManifestSettings) -> dict[str, Any]:
    if settings.model_claim:
        return {"persistentVolumeClaim": {"claimName": settings.model_claim, "readOnly": True}}
    return {"hostPath": {"path": path, "type": "Directory"}}
