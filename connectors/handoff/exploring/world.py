"""What the models share: operations, blocks, vLLM's requests, faults, and the network."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

Item = TypeVar("Item")


class Op(IntEnum):
    """One one-sided read or write. RIGHT and WRONG landed and did not return; a ZOMBIE returned an error, or its
    process died, and it may still land."""

    NONE = 0
    FLYING = 1
    RIGHT = 2
    WRONG = 3
    ZOMBIE = 4
    DONE_RIGHT = 5
    DONE_WRONG = 6
    LOST = 7


IN_TRANSIT = frozenset({Op.FLYING, Op.ZOMBIE})
LANDED = frozenset({Op.RIGHT, Op.WRONG})
NOT_RIGHT = frozenset({Op.FLYING, Op.ZOMBIE, Op.WRONG, Op.DONE_WRONG})


class Blocks(IntEnum):
    """Whose the blocks are: nobody's yet, the transfer's, or vLLM's again, which reuses them at once."""

    NONE = 0
    OURS = 1
    REUSED = 2


class Vllm(IntEnum):
    """The request on one engine. ENDED on D covers answered, failed, recomputed and aborted alike."""

    ABSENT = 0
    RUNNING = 1
    ABORTED = 2
    ANSWERED = 3
    DECODING = 4
    ENDED = 5
    PREEMPTING = 6
    PREEMPTED = 7


class Fault:
    """What may go wrong, as bits. That messages go astray is no fault but the network's nature."""

    CRASH_P = 1
    CRASH_D = 2
    CANCEL_P = 4
    CANCEL_D = 8
    RELEASE = 16
    """The proxy gives the transfer up."""
    FENCE_FAILS = 32
    PREEMPT = 64
    CLOSE_FAILS = 128
    FORGET = 256
    """A tombstone's time is over."""
    ERROR = 512
    """An operation returns an error; its bytes may have landed, land later, or never."""
    UNSENT = 1024
    """An operation fails before anything was submitted."""
    REFUSE = 2048
    """D finds that the transfer cannot work."""
    WRONG_CLAIM = 4096
    """Somebody claims with another prompt."""
    OTHER_FENCE = 8192
    """D destroys its endpoint for another transfer's sake."""
    OTHER_CLOSE = 16384
    """P closes its session for another transfer's sake."""


NO_FAULT = 0
EVERY_FAULT = 32767
FAILING_OPERATIONS = Fault.ERROR | Fault.UNSENT


@dataclass(frozen=True, slots=True)
class Budget:
    """Which faults may happen: `free` ones at any time, each of `once` once and no more than `most` of them."""

    once: int
    most: int
    free: int = FAILING_OPERATIONS

    def allows(self, fault: int, used: int) -> bool:
        if fault & self.free:
            return True
        return bool(fault & self.once) and not used & fault and used.bit_count() < self.most

    def spend(self, fault: int, used: int) -> int:
        return used if fault & self.free else used | fault

    def __str__(self) -> str:
        once = self.once & ~self.free if self.most else NO_FAULT
        parts = [f"any number of: {_words(self.free)}"] if self.free else []
        parts += [f"at most {min(self.most, once.bit_count())} of: {_words(once)}"] if once else []
        return "; ".join(parts) or "no fault"


def _words(faults: int) -> str:
    named = {name: bit for name, bit in vars(Fault).items() if isinstance(bit, int)}
    return ", ".join(name.lower().replace("_", " ") for name, bit in named.items() if bit & faults)


class Network:
    """Which messages were ever sent, as bits. What is in it may arrive now, later, again, or never."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}

    def bit(self, name: str) -> int:
        """The bit of a message, made at its first use."""
        return self._bits.setdefault(name, 1 << len(self._bits))


def put(values: tuple[Item, ...], index: int, value: Item) -> tuple[Item, ...]:
    """`values` with one of them replaced."""
    return (*values[:index], value, *values[index + 1 :])


def policy(answer_early: bool) -> str:
    """vLLM's `kv_load_failure_policy`: only `fail` lets an answer go out early."""
    return "fail" if answer_early else "recompute"
