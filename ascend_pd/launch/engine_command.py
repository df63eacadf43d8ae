"""The command line of one engine. Pure.

Sources: vLLM's `vllm serve` arguments; `KVTransferConfig` of vLLM for the connector's part.
"""

from __future__ import annotations

import json
from typing import Any

from ascend_pd.launch.engine_environment import engine_environment
from ascend_pd.launch.plan import Kind, ProcessPlan, Site, bind_host, engine_name, model_path
from ascend_pd.spec.cluster import ConnectorSpec, Hardware, Mode, PDCluster, PoolSpec, Role
from ascend_pd.spec.topology import Engine, Replica, Topology

CONNECTORS = {Mode.PULL: "MooncakeConnector", Mode.LAYERWISE: "MooncakeLayerwiseConnector"}
MODULE_PATH = "connectors"
_API_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
_HEADLESS = ("-m", "vllm.entrypoints.cli.main", "serve")


def kv_transfer_config(
    cluster: PDCluster, topology: Topology, replica: Replica, engine: Engine, node: int = 0
) -> dict[str, Any] | None:
    """vLLM's `--kv-transfer-config` of an engine on its `node`-th host, under whose address peers reach that host's
    workers; None for a union engine, which moves nothing."""
    if engine.role is Role.UNION:
        return None
    connector = cluster.spec.connector
    return {
        "kv_connector": CONNECTORS[connector.mode],
        "kv_connector_module_path": MODULE_PATH,
        "kv_role": "kv_producer" if engine.role is Role.PREFILL else "kv_consumer",
        "kv_port": engine.kv_port,
        "engine_id": engine.engine_id,
        "kv_load_failure_policy": connector.load_failure_policy,
        "kv_connector_extra_config": _extra_config(connector, topology, replica, engine_hosts(engine)[node]),
    }


def _extra_config(connector: ConnectorSpec, topology: Topology, replica: Replica, host: str) -> dict[str, Any]:
    """The keys of `ascend_pd.wire.connector_config.ConnectorConfig`; what the file leaves out is left out here."""
    config: dict[str, Any] = {
        "transport": connector.transport,
        "protocol": connector.protocol,
        "host": host,
        "hardware": replica.hardware.value,
        "lease_seconds": connector.lease_seconds,
        "max_hold_seconds": connector.max_hold_seconds,
        "transfer_seconds": connector.transfer_seconds,
        "quarantine_seconds": connector.quarantine_seconds,
        "staging_bytes": connector.staging_bytes,
        "checksum": connector.checksum,
    }
    if connector.secret_file:
        config["secret_file"] = connector.secret_file
    if topology.metaserver:
        config["metaserver"] = topology.metaserver.url
    if connector.memfabric_store:
        config["memfabric_store"] = connector.memfabric_store
    return config


def engine_arguments(
    cluster: PDCluster, topology: Topology, replica: Replica, engine: Engine, site: Site, node: int = 0
) -> list[str]:
    """The arguments after the module name; `node` counts the hosts of an engine that needs several."""
    spec = cluster.spec
    pool = spec.pools[replica.pool_index]
    arguments = _model_arguments(cluster, pool, model_path(cluster, replica.pool_index, site))
    if node == 0:
        arguments += ["--host", bind_host(engine.host), "--port", str(engine.http_port)]
    arguments += _parallel_arguments(pool, replica, engine, node)
    if replica.hardware is Hardware.CPU:
        arguments += ["--enforce-eager"]
    else:
        arguments += _npu_arguments(cluster, engine)
        arguments += ["--gpu-memory-utilization", f"{pool.memory_fraction:g}"]
    if pool.max_num_batched_tokens is not None:
        arguments += ["--max-num-batched-tokens", str(pool.max_num_batched_tokens)]
    config = kv_transfer_config(cluster, topology, replica, engine, node)
    if config is not None:
        arguments += ["--kv-transfer-config", json.dumps(config, separators=(",", ":"))]
    return [*arguments, *spec.engine.extra_args, *pool.extra_args]


def _npu_arguments(cluster: PDCluster, engine: Engine) -> list[str]:
    """What vllm-ascend 0.23 needs: a replayed graph calls no layer hooks, and vLLM 0.23 with overlapping steps frees
    blocks that a step still writes (0.32 defers that)."""
    if engine.role is Role.PREFILL and cluster.spec.connector.mode is Mode.LAYERWISE:
        return ["--enforce-eager"]
    return ["--no-async-scheduling"] if engine.role is Role.DECODE else []


def _model_arguments(cluster: PDCluster, pool: PoolSpec, path: str) -> list[str]:
    model, own = cluster.spec.model, pool.overrides
    arguments = ["--model", path, "--served-model-name", model.public_name]
    arguments += ["--max-model-len", str(own.max_model_len or model.max_model_len)]
    arguments += ["--dtype", own.dtype or model.dtype]
    cache_dtype = own.kv_cache_dtype or model.kv_cache_dtype
    if cache_dtype != "auto":
        arguments += ["--kv-cache-dtype", cache_dtype]
    return [*arguments, "--block-size", str(own.block_size or cluster.spec.engine.block_size)]


def _parallel_arguments(pool: PoolSpec, replica: Replica, engine: Engine, node: int) -> list[str]:
    parallel = pool.parallel
    arguments = ["--tensor-parallel-size", str(parallel.tp)] if parallel.tp > 1 else []
    if parallel.pp > 1:
        arguments += ["--pipeline-parallel-size", str(parallel.pp)]
    if replica.dp_rpc_port is not None:
        arguments += ["--data-parallel-size", str(parallel.dp), "--data-parallel-rank", str(engine.dp_rank)]
        arguments += ["--data-parallel-address", replica.engines[0].host]
        arguments += ["--data-parallel-rpc-port", str(replica.dp_rpc_port)]
    if parallel.ep:
        arguments += ["--enable-expert-parallel"]
    master_port = replica.master_port(engine.dp_rank)
    if master_port is not None:
        arguments += ["--nnodes", str(len(engine_hosts(engine))), "--node-rank", str(node)]
        arguments += ["--master-addr", engine.host, "--master-port", str(master_port)]
    return arguments


def engine_hosts(engine: Engine) -> tuple[str, ...]:
    """The hosts of one engine; the first one has its API server and its scheduler."""
    return tuple(dict.fromkeys(worker.host for worker in engine.workers))


def engine_plan(
    cluster: PDCluster, topology: Topology, replica: Replica, engine: Engine, site: Site, node: int = 0
) -> ProcessPlan:
    """The process of one engine on its `node`-th host; on any but the first it has workers only."""
    host = engine_hosts(engine)[node]
    arguments = engine_arguments(cluster, topology, replica, engine, site, node)
    if node == 0:
        argv = (site.python, *_API_SERVER, *arguments)
    else:
        argv = (site.python, *_HEADLESS, *arguments, "--headless")
    return ProcessPlan(
        name=engine_name(engine, len(replica.engines)) + (f"/node{node}" if node else ""),
        kind=Kind.ENGINE,
        argv=argv,
        env=engine_environment(cluster, topology, replica, engine, site, host),
        host=host,
        port=engine.http_port if node == 0 else 0,
        ports=_ports(replica, engine) if node == 0 else (),
    )


def _ports(replica: Replica, engine: Engine) -> tuple[int, ...]:
    coordination = replica.dp_rpc_port if engine.dp_rank == 0 else None
    side = engine.side_channel_port if engine.role is not Role.UNION else None
    return tuple(p for p in (engine.http_port, side, coordination, replica.master_port(engine.dp_rank)) if p)
