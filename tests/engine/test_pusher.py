"""P's pushes on one rank: what is claimed, what a session that must be closed spares, and what decode is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import connectors.layerwise.pusher as pusher_module
from ascend_pd.errors import TransferError
from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Answer, Claim, Pushed, Reply, Request, Verdict
from ascend_pd.wire.params import Reservation
from connectors.device.cpu import CpuDevice
from connectors.layerwise.metadata import LayerwiseMetadata, PushBegin, PushChunk, PushReport
from connectors.layerwise.progress import Batch
from connectors.layerwise.push import Push
from connectors.layerwise.pusher import Pusher

pytestmark = pytest.mark.engine
ENGINE = EngineRef("p", "life")
OK = Answer(verdict=Verdict.OK)


class Wire:
    """A transport whose writes last as long as a test wants, and end early when their endpoint is destroyed."""

    name, efficient_piece_bytes = "wire", 0

    def __init__(self) -> None:
        self.generation = 0
        self.destroyed: set[str] = set()
        self.users: dict[str, int] = {}
        self.changed = threading.Condition()
        self.gates: dict[str, threading.Event] = {}
        """By peer: its writes return once this is set."""
        self.failing: set[str] = set()

    @property
    def session(self) -> str:
        return f"e{self.generation}"

    def write(self, peer: str, via: str) -> None:
        gate = self.gates.get(peer)
        with self.changed:
            self.users[via] = self.users.get(via, 0) + 1
            self.changed.notify_all()
        try:
            while gate is not None and not gate.wait(0.01):
                if via in self.destroyed:
                    raise TransferError("cut off by a fence", quiesced=False)
            if peer in self.failing:
                raise TransferError("broken", quiesced=False)
        finally:
            with self.changed:
                self.users[via] -= 1
                self.changed.notify_all()

    def rotate(self, spare_s: float = 0.0, busy: Callable[[], bool] = lambda: False) -> str:
        with self.changed:
            former, self.generation = self.session, self.generation + 1
            self.changed.wait_for(lambda: self.users.get(former, 0) == 0, spare_s)
            self.destroyed.add(former)
            self.changed.wait_for(lambda: self.users.get(former, 0) == 0, 5.0)
        return self.session


class Bench:
    """A pusher between a scheduler and decode engines that the test plays."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.sent: list[Request] = []
        self.answers: dict[str, list[Reply]] = {}
        """By transfer: what its next messages are answered; OK when nothing is left."""
        self.handshakes: list[int] = []
        self.endpoints = 0
        config = SimpleNamespace(
            checksum=False,
            transfer_seconds=60.0,
            lease_seconds=30.0,
            max_hold_seconds=600.0,
            quarantine_seconds=10.0,
        )
        self.pusher = Pusher(
            SimpleNamespace(config=config),  # type: ignore[arg-type]
            CpuDevice(),
            self.wire,  # type: ignore[arg-type]
            SimpleNamespace(write=self._write, session_closed=lambda: None, close=lambda: None),  # type: ignore[arg-type]
            SimpleNamespace(peer=self._peer, forget=lambda address: None),  # type: ignore[arg-type]
            SimpleNamespace(request=self._request, submit=self._submit),  # type: ignore[arg-type]
            SimpleNamespace(wait_for=self._wait_for),  # type: ignore[arg-type]
            layout=SimpleNamespace(worker=0, regions=[SimpleNamespace(layer=0)]),  # type: ignore[arg-type]
            num_ranks=1,
        )
        self.freed: set[str] = set()
        self.reports: list[PushReport] = []

    def step(self, *names: str, finished: tuple[str, ...] = ()) -> None:
        """One step that computes these prompts whole; or hears that vLLM finished some."""
        metadata = LayerwiseMetadata(ENGINE, ("127.0.0.1", 1))
        for name in names:
            metadata.begins.append(PushBegin(name, name, "", 16, "hash"))
            metadata.chunks.append(PushChunk(name, ([1],), True, 0, 16))
        metadata.finished = dict(zip(finished, finished, strict=True))
        self.pusher.begin_step(metadata)
        self.pusher.save_layer(0)
        self.pusher.end_step()

    def settle(self, condition: Callable[[], Any], within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            freed, reports, _ = self.pusher.take_results()
            self.freed |= freed
            self.reports += reports
            assert time.monotonic() < deadline, (self.sent, self.freed, self.reports)
            time.sleep(0.01)

    def said(self, kind: type, name: str) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind) and message.transfer_id == name]

    def writing(self, session: str) -> bool:
        return self.wire.users.get(session, 0) > 0

    def _peer(self, address: Any, engine: EngineRef, timeout_s: float, endpoints: int = 0) -> Any:
        self.handshakes.append(self.endpoints)
        return SimpleNamespace(endpoints=self.endpoints, plan=SimpleNamespace(unit_tokens=16), workers={})

    def _write(self, push: Push, batches: list[Batch], deadline: float, via: str) -> None:
        self.wire.write(push.address[0], via)

    def _answer(self, message: Any) -> Reply:
        self.sent.append(message)
        waiting = self.answers.get(message.transfer_id) or [OK]
        return waiting.pop(0) if len(waiting) > 1 or waiting[0] is not OK else OK

    def _request(self, address: Any, message: Any, timeout_s: float) -> Reply:
        return self._answer(message)

    def _submit(self, address: Any, message: Any, timeout_s: float) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_result(self._answer(message))
        return future

    @staticmethod
    def _wait_for(metaserver: str, transfer_id: str, timeout_s: float) -> Future[Reservation]:
        future: Future[Reservation] = Future()
        future.set_result(
            Reservation(
                transfer_id=transfer_id,
                sink_engine_id="d",
                sink_epoch="e",
                sink_host=transfer_id,
                sink_port=1,
                block_ids=[[1]],
                block_size=16,
                tp_size=1,
                num_prompt_tokens=16,
                num_cached_tokens=0,
                prompt_hash="hash",
                deadline_seconds=60,
            )
        )
        return future


@pytest.fixture
def bench() -> Iterator[Bench]:
    found = Bench()
    yield found
    for gate in found.wire.gates.values():
        gate.set()
    found.pusher.close()


def test_a_failed_write_spares_the_healthy_ones_beside_it(bench: Bench) -> None:
    bench.wire.gates["healthy"] = threading.Event()
    bench.wire.failing.add("broken")
    bench.step("healthy")
    bench.settle(lambda: bench.writing("e0"))
    bench.step("broken")
    bench.settle(lambda: bench.wire.generation == 1)
    bench.wire.gates["healthy"].set()
    bench.step(finished=("healthy", "broken"))
    bench.settle(lambda: bench.freed == {"healthy", "broken"})
    assert bench.said(Pushed, "healthy") and not bench.said(Abort, "healthy")
    assert not bench.said(Pushed, "broken") and bench.said(Abort, "broken")[-1].drained is False


def test_blocks_written_through_the_new_session_stay_until_that_write_ends(bench: Bench) -> None:
    bench.wire.gates |= {"stuck": threading.Event(), "late": threading.Event()}
    bench.wire.failing.add("broken")
    bench.step("stuck")
    bench.settle(lambda: bench.writing("e0"))
    bench.step("broken")
    bench.settle(lambda: bench.wire.generation == 1)
    bench.step("late")
    bench.settle(lambda: bench.writing("e1"))
    bench.step(finished=("stuck", "broken", "late"))
    bench.settle(lambda: {"stuck", "broken"} <= bench.freed)
    assert "late" not in bench.freed and not bench.said(Abort, "late")
    bench.wire.gates["late"].set()
    bench.settle(lambda: "late" in bench.freed)
    assert bench.said(Pushed, "late")


def test_a_preemption_waits_for_the_one_session_that_is_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher_module, "PREEMPTION_DRAIN_S", 0.2)
    bench.wire.gates["stuck"] = threading.Event()
    bench.step("stuck")
    bench.settle(lambda: bench.writing("e0"))
    bench.pusher.preempt(["stuck"])
    assert not bench.writing("e0") and bench.wire.generation == 1
    time.sleep(0.1)
    assert bench.wire.generation == 1, "the session was closed twice"


def test_a_rank_that_is_refused_says_that_it_has_nothing_in_flight(bench: Bench) -> None:
    bench.answers["t"] = [Answer(verdict=Verdict.GONE, reason="cancelled")]
    bench.step("t")
    bench.settle(lambda: bench.said(Abort, "t"))
    assert bench.said(Abort, "t")[0].drained
    bench.step(finished=("t",))
    bench.settle(lambda: bench.freed == {"t"})


def test_a_claim_is_made_again_with_new_sessions_while_decode_renews_its_endpoint(bench: Bench) -> None:
    bench.answers["t"] = [Answer(verdict=Verdict.LATER), Answer(verdict=Verdict.LATER), OK]
    bench.step("t")
    bench.endpoints = 1
    bench.settle(lambda: bench.said(Pushed, "t"))
    claims = bench.said(Claim, "t")
    assert len(claims) == len(bench.handshakes) == 3 and claims[-1].endpoints == 1


def test_a_claim_does_not_wait_for_the_writes_before_it(bench: Bench) -> None:
    bench.wire.gates["d"] = threading.Event()
    bench.pusher._rendezvous.wait_for = lambda m, t, s: _to_one_engine(bench, t)  # type: ignore[method-assign]
    bench.step("first")
    bench.settle(lambda: bench.writing("e0"))
    bench.step("second")
    bench.settle(lambda: bench.said(Claim, "second"))
    assert bench.writing("e0")


def test_what_decode_does_not_take_is_told_as_failed_with_its_reason(bench: Bench) -> None:
    bench.answers["t"] = [OK, Answer(verdict=Verdict.GONE, reason="deadline passed")]
    bench.step("t")
    bench.settle(lambda: any(report.state == "failed" for report in bench.reports))
    assert "deadline passed" in next(report.reason for report in bench.reports if report.state == "failed")
    assert not any(report.state == "pushed" for report in bench.reports)


def _to_one_engine(bench: Bench, transfer_id: str) -> Future[Reservation]:
    found = bench._wait_for("", transfer_id, 0.0).result()
    future: Future[Reservation] = Future()
    future.set_result(Reservation(**{**{f: getattr(found, f) for f in found.__struct_fields__}, "sink_host": "d"}))
    return future
