"""What the life cycle's bookkeeping costs: Python time per request and side, from begin to the end of a transfer.

Prints a Markdown table. Aim: under 50 µs of Python per request and side. Every ledger call a connector makes for one
request is counted, deadlines included; messages are made beforehand, because framing them is the side channel's
cost. A dictionary entry made and removed gives the scale.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ascend_pd.wire.identity import EngineRef  # noqa: E402
from ascend_pd.wire.messages import Abort, Claim, Done, Pushed, Renew  # noqa: E402
from connectors.handoff.actions import FreeBlocks, Outcome, ReportFinished, SendPushed  # noqa: E402
from connectors.handoff.sink import SinkLedger  # noqa: E402
from connectors.handoff.source import SourceLedger  # noqa: E402

REQUESTS = 2000
HELD_BESIDE = 500
"""Transfers that stay in the ledger meanwhile."""
ROUNDS = 9
AIM_US = 50
RENEWALS = 2
FEW_WRITES, MANY_WRITES = 4, 12
P, D = EngineRef("p", "1"), EngineRef("d", "1")
Bench = Callable[[list[str]], None]


def check(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"the bench does not do what it says: {what}")


def pull_source() -> Bench:
    ledger = SourceLedger("1")
    for n in range(HELD_BESIDE):
        ledger.begin(f"beside{n}", "r", 0.0)
        ledger.hold(f"beside{n}", "r", 0.0)
    messages: dict[str, tuple[Renew, Done]] = {}

    def run(ids: list[str]) -> None:
        for tid in ids:
            renew, done = messages[tid]
            ledger.begin(tid, tid, 1.0)
            ledger.hold(tid, tid, 2.0)
            for _ in range(RENEWALS):
                ledger.handle(renew, 3.0)
                ledger.next_deadline()
            _, actions = ledger.handle(done, 4.0)
            ledger.next_deadline()
            check(isinstance(actions[0], FreeBlocks), "P frees at Done")

    def prepare(ids: list[str]) -> None:
        messages.clear()
        for tid in ids:
            done = Done(transfer_id=tid, source_epoch="1", sink=D, sink_rank=0, sink_ranks=1, read_id="r")
            messages[tid] = (Renew(transfer_id=tid, source_epoch="1"), done)

    return prepared(prepare, run)


def pull_sink(failing: bool) -> Bench:
    ledger = SinkLedger("1", "pull")

    def run(ids: list[str]) -> None:
        for tid in ids:
            ledger.begin(tid, tid, 1.0, source=P)
            ledger.start_reads(tid, "r", 1, 2.0)
            if failing:
                ledger.read_failed(tid, "timed out", 3.0, quiesced=False)
                actions = ledger.fenced(ledger.fence_begins(), 4.0)
            else:
                ledger.read_ok(tid, 3.0)
                actions = ledger.vouched(tid, "r", 4.0)
            ledger.next_deadline()
            report = actions[0]
            wanted = Outcome.FAILED if failing else Outcome.RECEIVED
            check(isinstance(report, ReportFinished) and report.outcome is wanted, "D reports")
            ledger.reported(tid, 5.0)

    return run


def push_source(writes: int) -> Bench:
    ledger = SourceLedger("1")

    def run(ids: list[str]) -> None:
        for tid in ids:
            ledger.begin(tid, tid, 1.0)
            ledger.granted(tid, D, 2.0)
            for n in range(writes):
                ledger.submit(tid, 3.0)
                if n == writes - 1:
                    ledger.all_submitted(tid, 3.0)
                actions = ledger.write_ok(tid, 3.0)
            check(isinstance(actions[0], SendPushed), "P says Pushed")
            check(isinstance(ledger.finished(tid, tid, 4.0)[0], FreeBlocks), "P frees")
            ledger.told(tid, 5.0)
            ledger.next_deadline()

    return run


def push_sink() -> Bench:
    ledger = SinkLedger("1", "layerwise")
    messages: dict[str, tuple[Claim, Pushed, Abort]] = {}

    def prepare(ids: list[str]) -> None:
        messages.clear()
        for tid in ids:
            claim = Claim(transfer_id=tid, sink_epoch="1", source=P, source_ranks=1, prompt_hash="h")
            pushed = Pushed(transfer_id=tid, sink_epoch="1", source=P, source_rank=0, num_tokens=8, bytes_sent=1)
            messages[tid] = (claim, pushed, Abort(transfer_id=tid, epoch="1", sender=P, reason="late"))

    def run(ids: list[str]) -> None:
        for tid in ids:
            claim, pushed, late = messages[tid]
            ledger.begin(tid, tid, 1.0, prompt_hash="h", num_tokens=8)
            ledger.handle(claim, 2.0)
            _, actions = ledger.handle(pushed, 3.0)
            check(isinstance(actions[0], ReportFinished), "D reports")
            ledger.reported(tid, 4.0)
            ledger.handle(late, 5.0)
            ledger.next_deadline()

    return prepared(prepare, run)


def dictionary() -> Bench:
    entries: dict[str, object] = {}

    def run(ids: list[str]) -> None:
        for tid in ids:
            entries[tid] = object()
            del entries[tid]

    return run


PREPARE: dict[Bench, Bench] = {}


def prepared(prepare: Bench, run: Bench) -> Bench:
    """`run`, whose messages `prepare` makes outside the measured time."""
    PREPARE[run] = prepare
    return run


def microseconds(run: Bench) -> list[float]:
    """Processor time per request of each round; every round has new transfer ids, so tombstones pile up."""
    times = []
    for round_number in range(ROUNDS + 1):
        ids = [f"{round_number}-{n}" for n in range(REQUESTS)]
        PREPARE.get(run, lambda _: None)(ids)
        started = time.thread_time()
        run(ids)
        times.append((time.thread_time() - started) * 1e6 / REQUESTS)
    return times[1:]


def main() -> None:
    rows: list[tuple[str, Bench]] = [
        (f"pull, P: begin, hold, {RENEWALS} renewals, Done ({HELD_BESIDE} held beside it)", pull_source()),
        ("pull, D rank: begin, read, vouched, reported", pull_sink(failing=False)),
        ("pull, D rank: the same with a read error and a fence", pull_sink(failing=True)),
        (f"layer-wise, P rank: begin, claim, {FEW_WRITES} writes, Pushed", push_source(FEW_WRITES)),
        (f"layer-wise, P rank: the same with {MANY_WRITES} writes", push_source(MANY_WRITES)),
        ("layer-wise, D: begin, claim, Pushed, reported, a late Abort", push_sink()),
        ("a dictionary entry made and removed, for scale", dictionary()),
    ]
    print("| one request | median, µs | range, µs | aim, µs |\n|---|---|---|---|")
    for name, run in rows:
        times = microseconds(run)
        aim = "" if "scale" in name else f"{AIM_US}"
        print(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f}-{max(times):.1f} | {aim} |")


if __name__ == "__main__":
    main()
