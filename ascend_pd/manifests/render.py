"""All files of a cluster: the placed cluster file, pools, metaserver, proxy, network policy, kustomization."""

from __future__ import annotations

from typing import Any

import yaml

from ascend_pd.manifests.engines import pool_objects
from ascend_pd.manifests.front import metaserver_objects, proxy_objects
from ascend_pd.manifests.objects import Object, labels, metadata
from ascend_pd.manifests.placement import place
from ascend_pd.manifests.settings import ManifestSettings
from ascend_pd.spec.cluster import PDCluster
from ascend_pd.spec.topology import derive_topology


class _Dumper(yaml.SafeDumper):
    """Block style, no aliases, texts of several lines as literal blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def dump(*objects: Object) -> str:
    """YAML documents."""
    text: str = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
    return text


def render(cluster: PDCluster, settings: ManifestSettings) -> dict[str, str]:
    """File name → text, in the order of applying.

    Raises:
        OperatorError: the cluster cannot be placed in Kubernetes.
    """
    placed = place(cluster)
    topology = derive_topology(placed)
    name = placed.metadata.name
    files = {"00-cluster.yaml": dump(_config_map(placed, settings))}
    for index, pool in enumerate(placed.spec.pools):
        files[f"10-pool-{pool.name}.yaml"] = dump(*pool_objects(placed, topology, index, settings))
    if objects := metaserver_objects(placed, topology, settings):
        files["20-metaserver.yaml"] = dump(*objects)
    files["30-proxy.yaml"] = dump(*proxy_objects(placed, topology, settings))
    files["40-network-policy.yaml"] = dump(_network_policy(name, settings))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
    }
    return {**files, "kustomization.yaml": dump(kustomization)}


def _config_map(cluster: PDCluster, settings: ManifestSettings) -> Object:
    name = cluster.metadata.name
    # Defaults are written out: another version's defaults must not change what these pods do.
    text = dump(cluster.model_dump(mode="json", by_alias=True, exclude_none=True))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(settings, f"{name}-cluster", labels(name, "cluster")),
        "data": {"cluster.yaml": text},
    }


def _network_policy(name: str, settings: ManifestSettings) -> Object:
    """Only this cluster's pods reach its engines and metaserver: data ports authenticate nobody."""
    instance = {"app.kubernetes.io/name": "ascend-pd", "app.kubernetes.io/instance": name}
    closed = {"key": "app.kubernetes.io/component", "operator": "In", "values": ["engine", "metaserver"]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(settings, f"{name}-closed", labels(name, "cluster")),
        "spec": {
            "podSelector": {"matchLabels": instance, "matchExpressions": [closed]},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": instance}}]}],
        },
    }
