"""The environment of one engine. Pure.

Sources: vLLM's CPU installation guide (`VLLM_CPU_*`), Mooncake's TCP transport settings (`MC_*`), the Ascend
direct transport (`ASCEND_*_TIMEOUT`, milliseconds), HCCL's environment reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address

from ascend_pd.launch.plan import Site
from ascend_pd.spec.cluster import ConnectorSpec, Hardware, PDCluster
from ascend_pd.spec.topology import Engine, Replica, Topology
from ascend_pd.wire.environment import mooncake_environment

CPU_CACHE_GIB = "1"
"""182 blocks of 128 tokens of SmolLM2-135M in float32; a pool's `env` sets another size."""

_ASCEND_CONNECT_MS, _ASCEND_TRANSFER_MS = 10_000, 10_000
_RDMA_TIMEOUT_EXPONENT, _RDMA_RETRIES = "17", "7"


def engine_environment(
    cluster: PDCluster, topology: Topology, replica: Replica, engine: Engine, site: Site, host: str
) -> Mapping[str, str]:
    """What an engine's processes on `host` get on top of the inherited environment.

    The cluster file's own `env` comes last, the pool's after the engine section's: the operator has the last word.
    """
    pool = cluster.spec.pools[replica.pool_index]
    env = {
        "PYTHONUNBUFFERED": "1",
        # The folder that a process is started in must not lend it a package called `proxy` or `connectors`.
        "PYTHONSAFEPATH": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": host,
        **transport_environment(cluster.spec.connector),
    }
    if replica.hardware is Hardware.CPU:
        env |= _cpu(topology, host, site)
    else:
        env |= _npu(engine, host)
    return {**env, **cluster.spec.engine.env, **pool.env}


def transport_environment(connector: ConnectorSpec) -> dict[str, str]:
    """The transport's timers, in an order that works; the preflight judges them with the file's own laid over."""
    if connector.transport != "mooncake":
        return {}
    env = mooncake_environment(connector.protocol)
    if connector.protocol == "ascend":
        env |= {
            "ASCEND_CONNECT_TIMEOUT": str(_ASCEND_CONNECT_MS),
            "ASCEND_TRANSFER_TIMEOUT": str(_ASCEND_TRANSFER_MS),
            # 4.096 µs · 2^17 · 7 = 3.8 s of RDMA retries; CANN's own 2^20 would outlast the transfer's timeout.
            "HCCL_RDMA_TIMEOUT": _RDMA_TIMEOUT_EXPONENT,
            "HCCL_RDMA_RETRY_CNT": _RDMA_RETRIES,
        }
    return env


def _cpu(topology: Topology, host: str, site: Site) -> dict[str, str]:
    sharing = sum(1 for engine in topology.engines if engine.host == host)
    return {
        "VLLM_CPU_KVCACHE_SPACE": CPU_CACHE_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, site.cores // max(1, sharing))),
    }


def _npu(engine: Engine, host: str) -> dict[str, str]:
    env = {"ASCEND_RT_VISIBLE_DEVICES": ",".join(str(device) for device in engine.devices_on(host))}
    try:
        ip_address(host)
    except ValueError:
        # A name: HCCL and vLLM then use the address of the default route.
        return env
    return {**env, "HCCL_IF_IP": host}
