"""The layer-wise model's state, and the messages and calls of each party."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Claim, Pushed, Release
from connectors.handoff.actions import Outcome
from connectors.handoff.exploring.parties import NOW, Call, T
from connectors.handoff.exploring.world import Blocks, Network, Op, Vllm

D0 = EngineRef("D", "life0")

BEGIN, FINISHED = Call("begin", T, "req", NOW), Call("finished", T, "req", NOW)
CANCEL_P, DENIED = Call("cancel", T, "", NOW), Call("denied", T, "", NOW)
GRANTED, TOLD = Call("granted", T, D0, NOW), Call("told", T, NOW)
SUBMIT, ALL_SUBMITTED = Call("submit", T, NOW), Call("all_submitted", T, NOW)
WRITE_OK = Call("write_ok", T, NOW)
WRITE_ERROR = Call("write_failed", T, "", NOW, quiesced=False)
WRITE_UNSENT = Call("write_failed", T, "", NOW, quiesced=True)
PREEMPTED, RESUMED = Call("preempted", T, NOW), Call("resumed", T, NOW)
DRAIN_OVERDUE, SESSION_CLOSED = Call("drain_overdue", T, NOW), Call("session_closed", NOW)
CLOSE_FAILED = Call("close_failed", T, "", NOW)
RELEASE = Call("handle", Release(transfer_id=T, reason="proxy"), NOW)
D_BEGIN = Call("begin", T, "req", NOW, prompt_hash="prompt")
D_CANCEL, D_REPORTED = Call("cancel", T, NOW), Call("reported", T, NOW)
D_REFUSE = Call("refuse", T, "", NOW)
WRONG_CLAIM = Call(
    "handle",
    Claim(
        transfer_id=T,
        sink_epoch=D0.epoch,
        source=EngineRef("wrong", "life0"),
        source_ranks=1,
        prompt_hash="other",
    ),
    NOW,
)
D_FENCED, D_FENCE_FAILED = Call("fenced", 0, NOW), Call("fence_failed", "", NOW)


class Rank(NamedTuple):
    """One rank of a writer. `close` counts 1 for a wanted end of the session, 2 for one that failed."""

    src: int = 0
    ops: tuple[Op, ...] = ()
    freed: bool = False
    close: int = 0


class Writer(NamedTuple):
    """One engine that means to write; its ranks step together."""

    ranks: tuple[Rank, ...]
    request: Vllm = Vllm.ABSENT
    blocks: Blocks = Blocks.NONE
    begun: bool = False
    deferred: bool = False
    alive: bool = True


class State(NamedTuple):
    """`fence` counts 1 for a wanted fence, 2 for one that failed; `fenced`: the endpoint P knows is destroyed."""

    writers: tuple[Writer, ...]
    snk: int = 0
    report: Outcome | None = None
    taken: bool = False
    fence: int = 0
    fenced: bool = False
    d: Vllm = Vllm.ABSENT
    d_blocks: Blocks = Blocks.NONE
    d_life: int = 0
    net: int = 0
    faults: int = 0


def sent(s: State, bits: int) -> State:
    """`s` with these messages in the network; the same object when they are there already."""
    return s if s.net & bits == bits else s._replace(net=s.net | bits)


class RankWires:
    """One rank of a writer: message bits, and how D's and its own ledger take the messages."""

    def __init__(self, net: Network, engine: EngineRef, name: str, rank: int) -> None:
        self.name = name
        self.pushed, self.told = net.bit(f"pushed {name}"), net.bit(f"told {name}")
        self.abort, self.drained = net.bit(f"abort of {name}"), net.bit(f"drained {name}")
        self.drained_reply = net.bit(f"{name} answered drained")
        pushed = Pushed(
            transfer_id=T, sink_epoch=D0.epoch, source=engine, source_rank=rank, num_tokens=1, bytes_sent=0
        )
        self.dirty = net.bit(f"dirty {name}")
        self.deliver_pushed = Call("handle", pushed, NOW)
        self.deliver_dirty = Call("handle", msgspec.structs.replace(pushed, dirty=True), NOW)
        self.deliver_abort = Call("handle", self._abort(engine, rank, False), NOW)
        self.deliver_drained = Call("handle", self._abort(engine, rank, True), NOW)
        self.answered_drained = Call("abort_answered", T, rank, True, NOW)

    def _abort(self, engine: EngineRef, rank: int, drained: bool) -> Abort:
        return Abort(transfer_id=T, epoch=D0.epoch, sender=engine, rank=rank, drained=drained, reason="P gives up")


class Wires:
    """One writer: its claim, D's Abort to it, and its ranks."""

    def __init__(self, net: Network, engine: EngineRef, ranks: int) -> None:
        name = self.name = f"{engine.engine_id}.{engine.epoch}" if engine.epoch != "life0" else engine.engine_id
        self.claim, self.granted, self.denied = (
            net.bit(f"claim {name}"),
            net.bit(f"yes {name}"),
            net.bit(f"no {name}"),
        )
        self.to_abort = net.bit(f"abort to {name}")
        claim = Claim(transfer_id=T, sink_epoch=D0.epoch, source=engine, source_ranks=ranks, prompt_hash="prompt")
        self.deliver_claim = Call("handle", claim, NOW)
        self.take_abort = Call(
            "handle", Abort(transfer_id=T, epoch=engine.epoch, sender=D0, reason="D gives up"), NOW
        )
        self.ranks = [RankWires(net, engine, f"{name}{rank}", rank) for rank in range(ranks)]
