"""Breadth-first search over all states of a model, with the shortest counterexample and the way to an end."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Step(NamedTuple, Generic[S]):
    """One thing that may happen. `certain`: it comes by itself, without a message or a fault having to."""

    label: str
    after: S
    certain: bool = False
    problems: tuple[str, ...] = ()
    """Rules that this step broke."""


class Model(Protocol[S]):
    """A closed world: everything that can happen in each of its states."""

    name: str
    bound: str
    """What the model contains and how often each fault may happen, in words."""

    def initial(self) -> S: ...

    def steps(self, state: S) -> Iterable[Step[S]]: ...

    def ended(self, state: S) -> bool:
        """Nobody holds a block for the transfer and vLLM waits for nothing."""
        ...

    def describe(self, state: S) -> str:
        """Where the parties stand, for a counterexample."""
        ...


class TooManyStatesError(Exception):
    """The model is larger than the caller allowed."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the search saw. `counterexample` is empty when no rule was broken."""

    name: str
    bound: str
    states: int
    transitions: int
    violation: str = ""
    counterexample: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.states} states, {self.transitions} transitions"]
        if self.violation:
            lines += [f"  VIOLATION: {self.violation}", *(f"  {line}" for line in self.counterexample)]
        return "\n".join(lines)


class _Graph(Generic[S]):
    """States in the order they were found, who found them, and every edge backwards."""

    def __init__(self, initial: S) -> None:
        self.index: dict[S, int] = {initial: 0}
        self.states: list[S] = [initial]
        self.found_by: list[tuple[int, str]] = [(-1, "start")]
        self.sources: list[list[int]] = [[]]
        self.certain_sources: list[list[int]] = [[]]
        self.transitions = 0

    def add(self, origin: int, step: Step[S]) -> None:
        self.transitions += 1
        if step.after is self.states[origin]:
            return
        number = self.index.get(step.after)
        if number is None:
            number = self.index[step.after] = len(self.states)
            self.states.append(step.after)
            self.found_by.append((origin, step.label))
            self.sources.append([])
            self.certain_sources.append([])
        if number != origin:
            self.sources[number].append(origin)
            if step.certain:
                self.certain_sources[number].append(origin)

    def unreaching(self, ends: Sequence[int], sources: Sequence[Sequence[int]]) -> int | None:
        """The first state found from which none of `ends` can be reached along `sources` backwards."""
        reached = bytearray(len(self.states))
        todo = list(ends)
        for number in todo:
            reached[number] = 1
        while todo:
            for origin in sources[todo.pop()]:
                if not reached[origin]:
                    reached[origin] = 1
                    todo.append(origin)
        missing = reached.find(0)
        return None if missing < 0 else missing

    def path(self, number: int, model: Model[S]) -> list[str]:
        steps = []
        while number >= 0:
            origin, label = self.found_by[number]
            steps.append(f"{label:<58} [{model.describe(self.states[number])}]")
            number = origin
        steps.reverse()
        return [f"{i:>3}. {step}" for i, step in enumerate(steps)]


def search(model: Model[S], max_states: int = 2_000_000) -> Result:
    """Visit every state. The first broken rule found is one with the fewest steps before it.

    Two kinds of end are asked for: from every state one must be reachable at all, and from every state one must be
    reachable by certain steps alone (timers, local work, operations coming back), that is with a network that
    delivers nothing any more.

    Raises:
        TooManyStatesError: more than `max_states`.
    """
    graph = _Graph(model.initial())
    ends = []
    number = 0
    while number < len(graph.states):
        state = graph.states[number]
        if model.ended(state):
            ends.append(number)
        for step in model.steps(state):
            graph.add(number, step)
            if step.problems:
                path = [*graph.path(number, model), f"  -> {step.label}", f"     {model.describe(step.after)}"]
                return _result(model, graph, "; ".join(step.problems), path)
        if len(graph.states) > max_states:
            raise TooManyStatesError(f"{model.name}: more than {max_states} states")
        number += 1
    for sources, what in (
        (graph.sources, "no end can be reached from here"),
        (graph.certain_sources, "without another message no end can be reached from here"),
    ):
        stuck = graph.unreaching(ends, sources)
        if stuck is not None:
            return _result(model, graph, what, graph.path(stuck, model))
    return _result(model, graph, "", [])


def _result(model: Model[S], graph: _Graph[S], violation: str, path: Sequence[str]) -> Result:
    return Result(model.name, model.bound, len(graph.states), graph.transitions, violation, tuple(path))
