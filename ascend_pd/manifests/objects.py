"""Pieces that all Kubernetes objects share."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from ascend_pd.manifests.settings import SPEC_PATH, ManifestSettings
from ascend_pd.spec.cluster import PDCluster

Object = dict[str, Any]


IMAGE_GROUP = 10001
"""The user and group of the images: files of the secret are readable for it alone."""


def labels(cluster: str, component: str, **more: str) -> dict[str, str]:
    """Recommended labels; selectors use all of them."""
    return {
        "app.kubernetes.io/name": "ascend-pd",
        "app.kubernetes.io/instance": cluster,
        "app.kubernetes.io/component": component,
        **more,
    }


def metadata(settings: ManifestSettings, name: str, of: dict[str, str]) -> Object:
    """Name, namespace when there is one, labels."""
    place = {"namespace": settings.namespace} if settings.namespace else {}
    return {"name": name, **place, "labels": of}


def config_volume(cluster: str) -> Object:
    """The cluster file."""
    return {"name": "cluster", "configMap": {"name": f"{cluster}-cluster"}}


def config_mount() -> Object:
    """Where pods find it."""
    return {"name": "cluster", "mountPath": SPEC_PATH, "subPath": "cluster.yaml", "readOnly": True}


def secret_files(cluster: PDCluster, component: str) -> dict[str, str]:
    """Key in the secret `CLUSTER-secret` → path that the cluster file gives, for one component."""
    spec = cluster.spec
    files = {"secret": spec.connector.secret_file}
    if component == "proxy":
        files |= {"admin-key": spec.proxy.admin_key_file, "api-keys": spec.proxy.api_key_file}
    return {key: path for key, path in files.items() if path}


def secret_volumes(cluster: PDCluster, component: str) -> tuple[list[Object], list[Object]]:
    """Volumes and mounts of the secret; the secret itself is made by the operator and never written to a file."""
    files = secret_files(cluster, component)
    if not files:
        return [], []
    name = f"{cluster.metadata.name}-secret"
    items = [{"key": key, "path": key} for key in files]
    volume = {"name": "secret", "secret": {"secretName": name, "items": items, "defaultMode": 0o440}}
    mounts = [
        {"name": "secret", "mountPath": str(PurePosixPath(path)), "subPath": key, "readOnly": True}
        for key, path in files.items()
    ]
    return [volume], mounts


def http_probe(port: int, path: str, *, every_s: int, failures: int) -> Object:
    """A probe that fails after every_s · failures seconds."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": every_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def service(settings: ManifestSettings, name: str, of: dict[str, str], ports: dict[str, int]) -> Object:
    """A ClusterIP service."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(settings, name, of),
        "spec": {
            "selector": of,
            "ports": [{"name": key, "port": port, "targetPort": port} for key, port in ports.items()],
        },
    }
