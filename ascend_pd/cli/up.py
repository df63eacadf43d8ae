"""`ascend-pd up SPEC`: start every role of a cluster file on this machine and keep watch."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ascend_pd.check import require_startable
from ascend_pd.errors import OperatorError
from ascend_pd.launch.front_command import cluster_plan
from ascend_pd.launch.preconditions import require_local, require_runnable
from ascend_pd.launch.session import supervising
from ascend_pd.launch.site import require_embedded_model, this_site
from ascend_pd.launch.supervisor import READY_S, Supervisor
from ascend_pd.spec.cluster import PDCluster
from ascend_pd.spec.load import load_parsed
from ascend_pd.spec.parse import Parsed
from ascend_pd.spec.topology import derive_topology

_OF_ONE_PROCESS = ("/dev/fd/", "/dev/stdin", "/proc/")
"""What `<(…)` and redirections are named."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="the cluster file")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="where logs go (default: logs/NAME)")
    parser.add_argument(
        "--ready-timeout", type=float, default=READY_S, metavar="SECONDS", help="default: %(default)g"
    )


def run(args: argparse.Namespace) -> int:
    """0 after an orderly stop, 130 when interrupted before all roles were ready; errors are OperatorError."""
    require_lasting(Path(args.spec))
    parsed = load_parsed(args.spec)
    require_startable(parsed.cluster, args.spec)
    log_dir = args.log_dir or Path("logs") / parsed.cluster.metadata.name
    return keep_up(parsed, Path(args.spec), log_dir, args.ready_timeout)


def require_lasting(spec: Path) -> None:
    """Refuse a name that means another file in the proxy's process than here.

    Raises:
        OperatorError
    """
    if str(spec.absolute()).startswith(_OF_ONE_PROCESS):
        raise OperatorError(
            f"{spec} is no file that the proxy can read again at /reload", "write it to a file, and name that"
        )


def keep_up(parsed: Parsed, spec: Path, log_dir: Path, ready_s: float) -> int:
    """Start, watch, stop; `spec` is the file that was parsed.

    The proxy starts minutes after that: from a private copy, so that it serves the engines that were started even if
    the file was edited meanwhile. What was edited is there for `/reload` to be followed, or refused.

    Raises:
        OperatorError: what kept a role from starting, or which one ended; by then all are stopped.
    """
    with tempfile.TemporaryDirectory(prefix="ascend-pd-up-") as private:
        started_from = Path(private) / "cluster.yaml"
        started_from.write_text(parsed.text, encoding="utf-8")
        return _keep_up(parsed.cluster, started_from, spec, log_dir, ready_s)


def _keep_up(cluster: PDCluster, started_from: Path, spec: Path, log_dir: Path, ready_s: float) -> int:
    site = this_site()
    topology = derive_topology(cluster)
    require_local(topology)
    require_embedded_model(cluster, site)
    plans = cluster_plan(cluster, topology, site, started_from, spec)
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
