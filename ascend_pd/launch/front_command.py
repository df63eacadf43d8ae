"""The command lines of the proxy and the metaserver. Pure.

Both are started as processes: this package imports neither.
"""

from __future__ import annotations

from pathlib import Path

from ascend_pd.launch.engine_command import engine_plan
from ascend_pd.launch.plan import Kind, ProcessPlan, Site
from ascend_pd.spec.cluster import PDCluster
from ascend_pd.spec.topology import Topology

FRONT_ENV = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}


def proxy_plan(topology: Topology, site: Site, spec: Path, reload_spec: Path | None = None) -> ProcessPlan:
    """The proxy's process. It reads the cluster file by itself, and again (or the other one) when it is told to."""
    again = ("--reload-spec", str(reload_spec.absolute())) if reload_spec else ()
    return ProcessPlan(
        name="proxy",
        kind=Kind.PROXY,
        argv=(site.python, "-m", "proxy", "--spec", str(spec.absolute()), *again),
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


def cluster_plan(
    cluster: PDCluster, topology: Topology, site: Site, spec: Path, reload_spec: Path | None = None
) -> tuple[ProcessPlan, ...]:
    """All processes of a cluster whose engines each fit on one host: metaserver, engines in file order, proxy.

    Args:
        spec: a file with the text that `cluster` was made from; it must not change before the proxy has started.
        reload_spec: what the proxy reads when it is told to read again; `spec` unless given.
    """
    engines = [
        engine_plan(cluster, topology, replica, engine, site)
        for replica in topology.replicas
        for engine in replica.engines
    ]
    front = [metaserver_plan(cluster, site)] if topology.metaserver else []
    return (*front, *engines, proxy_plan(topology, site, spec, reload_spec))
