"""`ascend-pd up SPEC`: start every role of a cluster file on this machine and keep watch."""

from __future__ import annotations

import argparse
from pathlib import Path

from ascend_pd.check import require_startable
from ascend_pd.launch.front_command import cluster_plan
from ascend_pd.launch.preconditions import require_local, require_runnable
from ascend_pd.launch.session import supervising
from ascend_pd.launch.site import require_embedded_model, this_site
from ascend_pd.launch.supervisor import READY_S, Supervisor
from ascend_pd.spec.cluster import PDCluster
from ascend_pd.spec.load import load_spec
from ascend_pd.spec.topology import derive_topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="the cluster file")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="where logs go (default: logs/NAME)")
    parser.add_argument(
        "--ready-timeout", type=float, default=READY_S, metavar="SECONDS", help="default: %(default)g"
    )


def run(args: argparse.Namespace) -> int:
    """0 after an orderly stop, 130 when interrupted before all roles were ready; errors are OperatorError."""
    cluster = load_spec(args.spec)
    require_startable(cluster, args.spec)
    return keep_up(
        cluster, Path(args.spec), args.log_dir or Path("logs") / cluster.metadata.name, args.ready_timeout
    )


def keep_up(cluster: PDCluster, spec: Path, log_dir: Path, ready_s: float) -> int:
    """Start, watch, stop; `spec` is the file that `cluster` was read from.

    Raises:
        OperatorError: what kept a role from starting, or which one ended; by then all are stopped.
    """
    site = this_site()
    topology = derive_topology(cluster)
    require_local(topology)
    require_embedded_model(cluster, site)
    plans = cluster_plan(cluster, topology, site, spec)
    require_runnable(cluster, plans)
    is_up = False
    with supervising():
        try:
            with Supervisor(plans, log_dir, say) as supervisor:
                supervisor.start(ready_s)
                is_up = True
                say(f"all ready: {topology.proxy.url}/v1 serves {cluster.spec.model.public_name!r}, Ctrl-C stops")
                supervisor.watch()
        except KeyboardInterrupt:
            if not is_up:
                raise
    say("stopped")
    return 0


def say(text: str) -> None:
    """One line for the operator."""
    print(f"up: {text}", flush=True)
