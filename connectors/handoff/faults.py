"""Faults on purpose: lost, repeated and late messages, failing and stalling transfers, short leases, corrupt bytes.

Off unless `ASCEND_PD_FAULTS` names some (or a test passes a plan). Pure but for a lock and counters: whoever sends a
message or moves bytes asks what is to happen to it. A plan is a comma-separated list:

    drop:KIND[:N]         lose the first N messages (default: all) of a kind, e.g. `drop:done:2`
    repeat:KIND[:N]       send the first N messages of a kind twice
    delay:KIND:S[:N]      send the first N messages of a kind S seconds late
    fail-transfer:N       the N-th read or write of this process returns an error after it was done
    stall:S[:N]           each read or write (or the N-th alone) waits S seconds before it begins
    corrupt-byte:N        the N-th read or write gets one byte wrong
    lease:S               leases last S seconds, whatever the configuration says

Kinds are the tags of `ascend_pd.wire.messages`, requests and replies alike (done, claim, answer, …); the replies to one
type of request alone are its tag with `.reply`: `drop:done.reply:1` loses P's first OK.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ascend_pd.errors import OperatorError
from ascend_pd.wire.messages import REPLY_TYPES, Request

FAULTS_VARIABLE = "ASCEND_PD_FAULTS"


def _tag(message: Any) -> str:
    return str(message.__struct_config__.tag)


REPLY_TAGS = {_tag(request): _tag(reply) for request, reply in REPLY_TYPES.items()}
"""What answers a request, unless it is refused; all others are answered with `answer`."""
_TAGS = tuple(map(_tag, Request.__args__))
KINDS = frozenset((*_TAGS, *(f"{tag}.reply" for tag in _TAGS), *REPLY_TAGS.values(), "answer"))
_REPEAT_AFTER_S = 0.05
_ALWAYS = 1 << 30


class MessageFault(StrEnum):
    """What happens to a message."""

    DROP = "drop"
    REPEAT = "repeat"
    DELAY = "delay"


@dataclass(frozen=True, slots=True)
class MessageRule:
    """One fault of one kind of message."""

    fault: MessageFault
    kind: str
    delay_s: float
    count: int


@dataclass(frozen=True, slots=True)
class TransferFault:
    """What happens to one read or write."""

    stall_s: float = 0.0
    fail: bool = False
    corrupt: bool = False


NO_FAULT = TransferFault()


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What is to go wrong in this process; transfers are counted from 1."""

    messages: tuple[MessageRule, ...] = ()
    fail_transfers: frozenset[int] = frozenset()
    corrupt_transfers: frozenset[int] = frozenset()
    stall_s: float = 0.0
    stall_transfer: int = 0
    """Which one stalls; 0 is every one."""
    lease_s: float = 0.0
    """0 leaves the configured lease."""

    def __bool__(self) -> bool:
        return self != FaultPlan()


def parse_faults(text: str) -> FaultPlan:
    """Read a plan; an empty text is no fault.

    Raises:
        OperatorError: a fault or a message kind that does not exist, a number that is none.
    """
    messages: list[MessageRule] = []
    failing: set[int] = set()
    corrupt: set[int] = set()
    stall_s, stall_transfer, lease_s = 0.0, 0, 0.0
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, *values = item.split(":")
        try:
            if name in set(MessageFault):
                messages.append(_message_rule(MessageFault(name), values))
            elif name == "fail-transfer":
                failing.add(int(*values))
            elif name == "corrupt-byte":
                corrupt.add(int(*values))
            elif name == "stall":
                stall_s, stall_transfer = float(values[0]), int(values[1]) if len(values) > 1 else 0
            elif name == "lease":
                lease_s = float(*values)
            else:
                raise ValueError(f"there is no fault {name!r}")
        except (ValueError, TypeError, IndexError) as error:
            raise OperatorError(
                f"{FAULTS_VARIABLE}: {item!r}: {error}", "see connectors/handoff/faults.py"
            ) from error
    return FaultPlan(tuple(messages), frozenset(failing), frozenset(corrupt), stall_s, stall_transfer, lease_s)


def _message_rule(fault: MessageFault, values: Sequence[str]) -> MessageRule:
    kind, *numbers = values
    if kind not in KINDS:
        raise ValueError(f"there is no message {kind!r}, only {', '.join(sorted(KINDS))}")
    delay_s = 0.0
    if fault is MessageFault.DELAY:
        delay_s = float(numbers.pop(0))
    count = int(numbers.pop(0)) if numbers else _ALWAYS
    if numbers:
        raise ValueError("too many numbers")
    return MessageRule(fault, kind, delay_s, count)


class FaultInjector:
    """A plan at work in one process. Thread-safe."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self._left = {rule: rule.count for rule in plan.messages}
        self._transfers = 0
        self._injected: dict[str, int] = {}
        self._lock = threading.Lock()

    def on_send(self, kind: str) -> Sequence[float]:
        """One delay in seconds per copy of a message that is about to be sent; none loses it.

        `kind` as in the plan; for a reply it is the request's tag with `.reply`.
        """
        tag, is_reply, _ = kind.partition(".reply")
        names = (kind, REPLY_TAGS.get(tag, "answer")) if is_reply else (kind,)
        with self._lock:
            for rule, left in self._left.items():
                if rule.kind in names and left > 0:
                    self._left[rule] = left - 1
                    self._note(f"{rule.fault}:{kind}")
                    if rule.fault is MessageFault.DROP:
                        return ()
                    return (rule.delay_s,) if rule.fault is MessageFault.DELAY else (0.0, _REPEAT_AFTER_S)
        return (0.0,)

    def on_transfer(self) -> TransferFault:
        """What happens to the read or write that is about to begin."""
        plan = self.plan
        with self._lock:
            self._transfers += 1
            number = self._transfers
            fault = TransferFault(
                stall_s=plan.stall_s if plan.stall_transfer in (0, number) else 0.0,
                fail=number in plan.fail_transfers,
                corrupt=number in plan.corrupt_transfers,
            )
            if fault != NO_FAULT:
                self._note("transfer")
        return fault

    def lease_s(self, configured: float) -> float:
        """How long a lease really lasts."""
        return self.plan.lease_s or configured

    def counts(self) -> dict[str, int]:
        """How often each fault was injected."""
        with self._lock:
            return dict(self._injected)

    def _note(self, name: str) -> None:
        self._injected[name] = self._injected.get(name, 0) + 1
