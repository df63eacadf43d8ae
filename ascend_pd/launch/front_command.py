"""The command lines of the proxy and the metaserver. Pure.

Both are started as processes: this package imports neither.
"""

from __future__ import annotations

from ascend_pd.launch.engine_command import engine_plan
from ascend_pd.launch.plan import Kind, ProcessPlan, Site
from ascend_pd.spec.cluster import PDCluster, ProxySpec, Role
from ascend_pd.spec.topology import Engine, Topology

FRONT_ENV = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
_DEFAULTS = ProxySpec()


def instance(engine: Engine) -> str:
    """How the proxy is told of an engine: its endpoint, and its side channel when it has one."""
    if engine.role is Role.UNION:
        return engine.url
    host = f"[{engine.host}]" if ":" in engine.host else engine.host
    return f"{engine.url},side={host}:{engine.side_channel_port}"


def proxy_arguments(cluster: PDCluster, topology: Topology) -> list[str]:
    """The arguments of `python -m proxy`."""
    proxy = cluster.spec.proxy
    arguments = ["--host", proxy.host, "--port", str(proxy.port), "--mode", topology.mode.value]
    for engine in topology.engines:
        arguments += [f"--{engine.role.value}", instance(engine)]
    if topology.metaserver:
        arguments += ["--metaserver", topology.metaserver.url]
    for field, value in _proxy_fields(cluster, topology).items():
        arguments += ["--set", f"{field}={value}"]
    return arguments


def _proxy_fields(cluster: PDCluster, topology: Topology) -> dict[str, str | int]:
    """Fields of the proxy's settings that have no option of their own, as far as the file says something."""
    proxy = cluster.spec.proxy
    fields: dict[str, str | int | None] = {
        "policy.prefill": proxy.policy.prefill if proxy.policy.prefill != _DEFAULTS.policy.prefill else None,
        "policy.decode": proxy.policy.decode if proxy.policy.decode != _DEFAULTS.policy.decode else None,
        "secret_file": cluster.spec.connector.secret_file,
        "listener.admin_host": topology.admin.host if topology.admin else None,
        "listener.admin_port": topology.admin.port if topology.admin else None,
        "listener.admin_key_file": proxy.admin_key_file,
        "listener.api_key_file": proxy.api_key_file,
    }
    return {field: value for field, value in fields.items() if value is not None}


def proxy_plan(cluster: PDCluster, topology: Topology, site: Site) -> ProcessPlan:
    """The proxy's process."""
    return ProcessPlan(
        name="proxy",
        kind=Kind.PROXY,
        argv=(site.python, "-m", "proxy", *proxy_arguments(cluster, topology)),
        env=FRONT_ENV,
        host=topology.proxy.host,
        port=topology.proxy.port,
        ready_path="/ready",
        ports=tuple(address.port for address in (topology.proxy, topology.admin) if address),
    )


def metaserver_arguments(cluster: PDCluster) -> list[str]:
    """The arguments of `python -m metaserver`."""
    metaserver = cluster.spec.metaserver
    arguments = ["--host", metaserver.host, "--port", str(metaserver.port)]
    if cluster.spec.connector.secret_file:
        arguments += ["--secret-file", cluster.spec.connector.secret_file]
    return arguments


def metaserver_plan(cluster: PDCluster, site: Site) -> ProcessPlan:
    """The metaserver's process."""
    metaserver = cluster.spec.metaserver
    return ProcessPlan(
        name="metaserver",
        kind=Kind.METASERVER,
        argv=(site.python, "-m", "metaserver", *metaserver_arguments(cluster)),
        env=FRONT_ENV,
        host=metaserver.host,
        port=metaserver.port,
        ports=(metaserver.port,),
    )


def cluster_plan(cluster: PDCluster, topology: Topology, site: Site) -> tuple[ProcessPlan, ...]:
    """All processes of a cluster whose engines each fit on one host: metaserver, engines in file order, proxy."""
    engines = [
        engine_plan(cluster, topology, replica, engine, site)
        for replica in topology.replicas
        for engine in replica.engines
    ]
    front = [metaserver_plan(cluster, site)] if topology.metaserver else []
    return (*front, *engines, proxy_plan(cluster, topology, site))
