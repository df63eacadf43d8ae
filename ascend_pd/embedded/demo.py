"""The demo: start the embedded cluster, ask one question through it, say what was measured, stop."""

from __future__ import annotations

import dataclasses
import json
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ascend_pd.embedded.conversation import Answer, DemoFailed, Measured, ask, measured
from ascend_pd.embedded.demo_cluster import SERVED_NAME, DemoPorts, demo_cluster_text
from ascend_pd.errors import OperatorError
from ascend_pd.launch.front_command import cluster_plan
from ascend_pd.launch.plan import Kind, ProcessPlan
from ascend_pd.launch.preconditions import require_runnable
from ascend_pd.launch.session import supervising
from ascend_pd.launch.site import require_embedded_model, this_site
from ascend_pd.launch.supervisor import Supervisor
from ascend_pd.spec.cluster import Mode
from ascend_pd.spec.parse import parse_spec
from ascend_pd.spec.topology import Topology, derive_topology

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
_EXPOSE_RECORDS = ("--set", "observability.expose_records=true")
"""The proxy tells its records on its own port: it listens on loopback, and for this one request."""


def run_demo(mode: Mode, log_dir: Path, ready_s: float) -> str:
    """The demo's last line.

    Raises:
        OperatorError: something that the operator can put right is missing or in the way.
        DemoFailed: it ran and did not do its main job.
    """
    text = demo_cluster_text(mode, free_ports(random.Random()))
    cluster = parse_spec(text).cluster
    topology = derive_topology(cluster)
    site = this_site()
    require_embedded_model(cluster, site)
    _keep_spec(text, log_dir)
    with tempfile.TemporaryDirectory(prefix="ascend-pd-demo-") as private:
        # Two demos may share their log directory; each proxy reads its own file.
        spec = Path(private) / "cluster.yaml"
        spec.write_text(text, encoding="utf-8")
        plans = [_with_records(plan) for plan in cluster_plan(cluster, topology, site, spec)]
        require_runnable(cluster, plans)
        answer, figures = _converse(plans, log_dir, ready_s, topology)
    return last_line(mode, answer, figures)


def _converse(
    plans: Sequence[ProcessPlan], log_dir: Path, ready_s: float, topology: Topology
) -> tuple[Answer, Measured]:
    with supervising(), Supervisor(plans, log_dir, say) as supervisor:
        supervisor.start(ready_s)
        say(f"asking: {QUESTION}")
        try:
            answer = ask(f"{topology.proxy.url}/v1", SERVED_NAME, QUESTION, _show)
            print(flush=True)
            figures = measured(topology.proxy.host, topology.proxy.port, answer.transfer_id)
        except DemoFailed:
            # A role that died is the better reason, and its end may be noticed a moment after the error it caused.
            supervisor.check(settle_s=2.0)
            raise
        for line in report_lines(answer, figures):
            say(line)
    return answer, figures


def report_lines(answer: Answer, figures: Measured) -> list[str]:
    """What was measured, for people."""
    return [
        f"prompt tokens     {answer.prompt_tokens}",
        f"KV cache moved    {figures.kv_bytes / 1e6:.2f} MB and {figures.transfer_ms:.1f} ms after the prefill",
        f"in prefill        {figures.prefill_ms:.0f} ms",
        f"to first token    {answer.first_token_ms:.0f} ms, to the last {answer.total_ms:.0f} ms",
    ]


def last_line(mode: Mode, answer: Answer, figures: Measured) -> str:
    """The verdict, for scripts.

    Raises:
        DemoFailed: an answer that a sound cache would not lead to.
    """
    if EXPECTED not in answer.text:
        raise DemoFailed(f"the answer does not name {EXPECTED}: {answer.text!r}")
    quoted = json.dumps(answer.text, ensure_ascii=False)
    return (
        f"demo: ok mode={mode.value} answer={quoted} "
        f"kv_bytes={figures.kv_bytes} transfer_ms={figures.transfer_ms:.1f}"
    )


def say(text: str) -> None:
    """One line for the person who runs the demo."""
    print(f"demo: {text}", flush=True)


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _with_records(plan: ProcessPlan) -> ProcessPlan:
    if plan.kind is not Kind.PROXY:
        return plan
    return dataclasses.replace(plan, argv=(*plan.argv, *_EXPOSE_RECORDS))


def _keep_spec(text: str, log_dir: Path) -> None:
    """Leave the cluster file beside the logs."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        (log_dir / "cluster.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise OperatorError(
            f"cannot write to {log_dir}: {error.strerror}", "name another directory with --log-dir"
        ) from error


def free_ports(rng: random.Random, is_free: Callable[[int], bool] | None = None) -> DemoPorts:
    """Ports that nothing listens on, all below the range that the system hands out to outgoing connections.

    Raises:
        OperatorError: none found in a hundred tries.
    """
    is_free = is_free or _is_free
    for _ in range(100):
        base = rng.randrange(18000, 31000, 10)
        if all(is_free(port) for port in range(base, base + 6)):
            return DemoPorts(prefill=base, decode=base + 1, proxy=base + 2, metaserver=base + 3, kv=base + 4)
    raise OperatorError("no free ports between 18000 and 31000 on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
