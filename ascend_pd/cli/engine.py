"""`ascend-pd engine SPEC --pool NAME`: run, or print, one engine of a cluster file."""

from __future__ import annotations

import argparse
import os

from ascend_pd.check import require_startable
from ascend_pd.errors import OperatorError
from ascend_pd.launch import guardian
from ascend_pd.launch.engine_command import engine_hosts, engine_plan
from ascend_pd.launch.plan import ProcessPlan, Site
from ascend_pd.launch.preconditions import require_runnable
from ascend_pd.launch.site import as_shell, full_environment, require_embedded_model, this_site
from ascend_pd.spec.cluster import PDCluster
from ascend_pd.spec.load import load_spec
from ascend_pd.spec.topology import derive_topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="the cluster file")
    parser.add_argument("--pool", required=True, metavar="NAME", help="the pool that the engine is in")
    parser.add_argument("--replica", type=int, default=0, metavar="N", help="which replica (default: 0)")
    parser.add_argument("--dp-rank", type=int, default=0, metavar="N", help="which of its DP ranks (default: 0)")
    parser.add_argument(
        "--node", type=int, default=0, metavar="N", help="which of the engine's hosts (default: 0)"
    )
    parser.add_argument("--print", action="store_true", help="print the environment and command line, run nothing")


def run(args: argparse.Namespace) -> int:
    """The engine's exit code, or 0 after printing."""
    cluster = load_spec(args.spec)
    require_startable(cluster, args.spec)
    site = this_site()
    plan = select_plan(cluster, site, args.pool, args.replica, args.dp_rank, args.node)
    if args.print:
        print(as_shell(plan))
        return 0
    require_embedded_model(cluster, site)
    require_runnable(cluster, [plan])
    return guardian.guard(plan.argv, env=full_environment(plan, os.environ))


def select_plan(cluster: PDCluster, site: Site, pool: str, replica: int, dp_rank: int, node: int) -> ProcessPlan:
    """The plan of one engine.

    Raises:
        OperatorError: the cluster file has no such pool, replica, rank or node; says which there are.
    """
    topology = derive_topology(cluster)
    found = topology.replica(pool, replica)
    if found is None:
        names = ", ".join(f"{p.name} (replicas 0 to {p.replicas - 1})" for p in cluster.spec.pools)
        raise OperatorError(f"the cluster file has no replica {pool}/{replica}", f"it has: {names}")
    if not 0 <= dp_rank < len(found.engines):
        raise OperatorError(f"{pool}/{replica} has no DP rank {dp_rank}", f"it has 0 to {len(found.engines) - 1}")
    engine = found.engines[dp_rank]
    hosts = engine_hosts(engine)
    if not 0 <= node < len(hosts):
        raise OperatorError(f"{pool}/{replica} has no node {node}", f"it has 0 to {len(hosts) - 1}")
    return engine_plan(cluster, topology, found, engine, site, node)
