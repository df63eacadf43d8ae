"""The pull model's state, and the messages and calls of each party."""

from __future__ import annotations

from typing import NamedTuple

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Done, Release, Renew
from connectors.handoff.actions import Outcome
from connectors.handoff.exploring.parties import NOW, Call, T
from connectors.handoff.exploring.world import EVERY_FAULT, Blocks, Budget, Fault, Network, Op, Vllm

P0, P1 = EngineRef("P", "life0"), EngineRef("P", "life1")
D0, OTHER = EngineRef("D", "life0"), EngineRef("other", "life0")
PULL_FAULTS = EVERY_FAULT & ~(Fault.PREEMPT | Fault.CLOSE_FAILS | Fault.WRONG_CLAIM | Fault.OTHER_CLOSE)
ALL_OF_PULL = Budget(once=PULL_FAULTS, most=4)


class State(NamedTuple):
    """Tuples are per rank of D; `fences` counts 1 for a wanted fence, 2 for one that failed."""

    snk: tuple[int, ...]
    ops: tuple[tuple[Op, ...], ...]
    reports: tuple[Outcome | None, ...]
    taken: tuple[bool, ...]
    fences: tuple[int, ...]
    src: int = 0
    p: Vllm = Vllm.ABSENT
    p_blocks: Blocks = Blocks.NONE
    p_life: int = 0
    d: Vllm = Vllm.ABSENT
    d_blocks: Blocks = Blocks.NONE
    d_life: int = 0
    net: int = 0
    faults: int = 0


class RankWires:
    """What one rank of D sends and calls: message bits and the ways its ledger is driven."""

    def __init__(self, net: Network, rank: int, ranks: int, reads: int) -> None:
        read_id = f"read{rank}"
        self.done, self.ok, self.no = net.bit(f"done{rank}"), net.bit(f"ok{rank}"), net.bit(f"no{rank}")
        self.message = done_message(rank, ranks, D0, read_id)
        self.deliver = Call("handle", self.message, NOW)
        self.start = Call("start_reads", T, read_id, reads, NOW)
        self.vouched = Call("vouched", T, read_id, NOW)
        self.disowned = Call("disowned", T, read_id, "", NOW)


def done_message(rank: int, ranks: int, sink: EngineRef, read_id: str) -> Done:
    return Done(transfer_id=T, source_epoch=P0.epoch, sink=sink, sink_rank=rank, sink_ranks=ranks, read_id=read_id)


P_BEGIN, P_HOLD = Call("begin", T, "req", NOW), Call("hold", T, "req", NOW)
P_SIBLING, P_CANCEL = Call("hold", T, "sibling", NOW), Call("cancel", T, "", NOW)
P_RENEW = Call("handle", Renew(transfer_id=T, source_epoch=P0.epoch), NOW)
P_RELEASE = Call("handle", Release(transfer_id=T, reason="proxy"), NOW)
P_ABORT = Call("handle", Abort(transfer_id=T, epoch=P0.epoch, sender=D0, reason="D"), NOW)
D_BEGIN, D_CANCEL = Call("begin", T, "req", NOW, source=P0), Call("cancel", T, NOW)
D_READ_OK, D_REPORTED = Call("read_ok", T, NOW), Call("reported", T, NOW)
D_ERROR = Call("read_failed", T, "", NOW, quiesced=False)
D_UNSENT = Call("read_failed", T, "", NOW, quiesced=True)
D_REFUSE = Call("refuse", T, "", NOW)
D_FENCED, D_FENCE_FAILED = Call("fenced", 0, NOW), Call("fence_failed", "", NOW)


def sent(s: State, bit: int) -> State:
    """`s` with this message in the network; the same object when it is there already."""
    return s if s.net & bit else s._replace(net=s.net | bit)
