"""`python -m connectors.handoff.explore`: visit every state of the life cycle's models and look for a broken rule.

Prints each model's bound and the states explored. Exit status 0: 0 violations; 1: a violation, printed as the
shortest sequence of steps that leads to it; 2: bad usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from connectors.handoff.exploring.capacity import CapacityModel
from connectors.handoff.exploring.pull import PullModel
from connectors.handoff.exploring.pull_world import PULL_FAULTS
from connectors.handoff.exploring.push import PushModel
from connectors.handoff.exploring.search import Model, Result, search
from connectors.handoff.exploring.world import EVERY_FAULT, FAILING_OPERATIONS, NO_FAULT, Budget, Fault

CORE = Fault.CRASH_P | Fault.CRASH_D | Fault.CANCEL_D | Fault.PREEMPT | Fault.FENCE_FAILS | Fault.ERROR
REBIRTH = Fault.CRASH_P | Fault.ERROR | Fault.CANCEL_D | Fault.FENCE_FAILS

STANDARD: tuple[Callable[[], Model[Any]], ...] = (
    PullModel,
    lambda: PullModel(answer_early=False, budget=Budget(PULL_FAULTS, 2)),
    lambda: PullModel(reads=2, budget=Budget(PULL_FAULTS, 2)),
    lambda: PullModel(ranks=2, budget=Budget(PULL_FAULTS, 1, free=NO_FAULT)),
    lambda: PushModel(budget=Budget(CORE, 2, free=NO_FAULT)),
    lambda: PushModel(answer_early=False, budget=Budget(EVERY_FAULT, 1)),
    lambda: PushModel(writes=2, budget=Budget(CORE, 1, free=NO_FAULT)),
    lambda: PushModel(writers=("P", "P"), budget=Budget(Fault.CRASH_P, 1, free=NO_FAULT)),
    lambda: PushModel(writers=("P", "Q"), budget=Budget(NO_FAULT, 0, free=NO_FAULT)),
    CapacityModel,
)
"""What the unit tests run."""

THOROUGH: tuple[Callable[[], Model[Any]], ...] = (
    *STANDARD,
    lambda: PullModel(ranks=2, budget=Budget(PULL_FAULTS, 2, free=NO_FAULT)),
    lambda: PushModel(budget=Budget(EVERY_FAULT, 2, free=NO_FAULT)),
    lambda: PushModel(writes=2, budget=Budget(EVERY_FAULT, 1, free=NO_FAULT)),
    lambda: PushModel(ranks=2, budget=Budget(NO_FAULT, 0, free=NO_FAULT)),
    lambda: PushModel(ranks=2, budget=Budget(FAILING_OPERATIONS, 1, free=NO_FAULT)),
    lambda: PushModel(writers=("P", "P"), budget=Budget(REBIRTH, 2, free=NO_FAULT)),
    lambda: PushModel(writers=("P", "Q"), budget=Budget(CORE, 1, free=NO_FAULT)),
    lambda: CapacityModel(transfers=5, p_slots=3, d_slots=3),
)
"""Larger bounds: minutes, and some gigabytes of memory."""


def explore(models: Sequence[Callable[[], Model[Any]]] = STANDARD) -> list[Result]:
    """Search each model to its bound."""
    return [search(make()) for make in models]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m connectors.handoff.explore")
    parser.add_argument("--thorough", action="store_true", help="larger bounds: minutes instead of seconds")
    options = parser.parse_args(argv)
    started = time.monotonic()
    states = transitions = violations = 0
    for make in THOROUGH if options.thorough else STANDARD:
        result = search(make(), max_states=20_000_000)
        print(f"{result}\n    bound: {result.bound}", flush=True)
        states, transitions = states + result.states, transitions + result.transitions
        violations += bool(result.violation)
    elapsed_s = time.monotonic() - started
    print(f"{states} states, {transitions} transitions, {violations} violations ({elapsed_s:.0f} s)")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
