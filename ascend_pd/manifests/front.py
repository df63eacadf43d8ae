"""The proxy's and the metaserver's objects: a Deployment of one pod and a Service each.

One metaserver and one proxy: both keep their state in memory.
"""

from __future__ import annotations

from ascend_pd.manifests.objects import (
    IMAGE_GROUP,
    Object,
    config_mount,
    config_volume,
    http_probe,
    labels,
    metadata,
    secret_volumes,
    service,
)
from ascend_pd.manifests.settings import SPEC_PATH, ManifestSettings
from ascend_pd.spec.cluster import PDCluster
from ascend_pd.spec.topology import Topology

GRACE_S = 120
"""Streams that are under way finish."""
LEAVING_S = 5
"""A terminating pod still serves while the cluster's nodes take it out of the Service."""


def proxy_objects(cluster: PDCluster, topology: Topology, settings: ManifestSettings) -> list[Object]:
    """The OpenAI endpoint, and its admin listener when the file has one."""
    ports = {"http": topology.proxy.port}
    ready = http_probe(topology.proxy.port, "/ready", every_s=5, failures=2)
    if topology.admin:
        ports["admin"] = topology.admin.port
    deployment = _deployment(cluster, "proxy", topology.proxy.port, settings)
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["readinessProbe"] = ready
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(LEAVING_S)]}}}
    own = deployment["spec"]["template"]["metadata"]["labels"]
    # The admin API stays inside the pod's own network unless adminHost says otherwise.
    offered = {"http": ports["http"]} if topology.admin and topology.admin.host.startswith("127.") else ports
    return [deployment, service(settings, f"{cluster.metadata.name}-proxy", own, offered)]


def metaserver_objects(cluster: PDCluster, topology: Topology, settings: ManifestSettings) -> list[Object]:
    """The rendezvous; none in pull mode."""
    if topology.metaserver is None:
        return []
    port = topology.metaserver.port
    deployment = _deployment(cluster, "metaserver", port, settings, "--host", "0.0.0.0")
    own = deployment["spec"]["template"]["metadata"]["labels"]
    return [deployment, service(settings, f"{cluster.metadata.name}-metaserver", own, {"http": port})]


def _deployment(
    cluster: PDCluster, component: str, port: int, settings: ManifestSettings, *options: str
) -> Object:
    name = cluster.metadata.name
    own = labels(name, component)
    secrets, secret_mounts = secret_volumes(cluster, component)
    container = {
        "name": component,
        "image": settings.proxy_image if component == "proxy" else settings.metaserver_image,
        "command": ["ascend-pd", component, SPEC_PATH, *options],
        "ports": [{"name": "http", "containerPort": port}],
        "startupProbe": http_probe(port, "/health", every_s=2, failures=60),
        "livenessProbe": http_probe(port, "/health", every_s=10, failures=6),
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [config_mount(), *secret_mounts, {"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(settings, f"{name}-{component}", own),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": own},
            "template": {
                "metadata": {"labels": own},
                "spec": {
                    "terminationGracePeriodSeconds": GRACE_S,
                    "automountServiceAccountToken": False,
                    "securityContext": {"fsGroup": IMAGE_GROUP, "runAsNonRoot": True, "runAsUser": IMAGE_GROUP},
                    "containers": [container],
                    "volumes": [config_volume(name), *secrets, {"name": "tmp", "emptyDir": {}}],
                },
            },
        },
    }
