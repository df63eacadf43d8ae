"""Where everything runs in Kubernetes, written back into the cluster file: hosts are pod names, addresses are
services.

A replica is a StatefulSet `CLUSTER-POOL-INDEX` with a pod per node; its pods are `CLUSTER-POOL-INDEX-NODE`
under the headless service `CLUSTER-POOL`. The placed file is an ordinary one with `hosts`: every process reads
it and derives the same topology as on bare metal.
"""

from __future__ import annotations

from ascend_pd.errors import OperatorError
from ascend_pd.spec.cluster import Hardware, PDCluster, PoolSpec
from ascend_pd.spec.topology import nodes_needed

LONGEST_LABEL = 63


def replica_name(cluster: str, pool: str, index: int) -> str:
    """Name of a replica's StatefulSet."""
    return f"{cluster}-{pool}-{index}"


def pool_service(cluster: str, pool: str) -> str:
    """Name of a pool's headless service."""
    return f"{cluster}-{pool}"


def pod_hosts(cluster: str, pool: PoolSpec) -> tuple[str, ...]:
    """DNS names of a pool's pods inside the namespace, replica after replica."""
    return tuple(
        f"{replica_name(cluster, pool.name, index)}-{node}.{pool_service(cluster, pool.name)}"
        for index in range(pool.replicas)
        for node in range(nodes_needed(pool))
    )


def place(cluster: PDCluster) -> PDCluster:
    """The cluster file for use inside Kubernetes.

    Raises:
        OperatorError: a pool names machines; a name would be too long for a DNS label.
    """
    name = cluster.metadata.name
    pools = []
    for index, pool in enumerate(cluster.spec.pools):
        if pool.hosts:
            raise OperatorError(
                f"$.spec.pools[{index}].hosts: pool {pool.name!r} names machines, Kubernetes places pods itself",
                "leave hosts out: nodes are chosen by labels",
            )
        hosts = pod_hosts(name, pool)
        longest = max(len(host.partition(".")[0]) for host in hosts)
        if longest > LONGEST_LABEL:
            raise OperatorError(
                f"pods of pool {pool.name!r} would have names of {longest} characters, {LONGEST_LABEL} at most",
                "shorten metadata.name or the pool's name",
            )
        pools.append(pool.model_copy(update={"hosts": hosts}))
    spec = cluster.spec
    placed = spec.model_copy(
        update={
            "pools": tuple(pools),
            "metaserver": spec.metaserver.model_copy(update={"host": f"{name}-metaserver"}),
            "proxy": spec.proxy.model_copy(update={"host": "0.0.0.0"}),
        }
    )
    return cluster.model_copy(update={"spec": placed})


def devices_per_pod(pool: PoolSpec) -> int:
    """NPUs that one pod asks for; 0 on CPU."""
    if pool.hardware is Hardware.CPU:
        return 0
    return -(-pool.parallel.world_size // nodes_needed(pool))
