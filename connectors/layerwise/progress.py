"""How far each layer of one prompt is computed and sent. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ascend_pd.layout.plan import ready_range


@dataclass(frozen=True, slots=True)
class Batch:
    """Layers whose tokens `[first, end)` are final and not sent yet."""

    layers: frozenset[int]
    first: int
    end: int
    after: tuple[Any, ...]
    """Device events that must be done before the bytes are read."""


class PushProgress:
    """Counts in prompt tokens, per layer.

    Args:
        layers: the layers of this worker.
        num_tokens: the prompt's length.
        unit_tokens: larger block size of both sides; only whole blocks are final before the prompt's end.
    """

    def __init__(self, layers: Iterable[int], num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._ready = dict.fromkeys(layers, 0)
        self._sent = dict.fromkeys(self._ready, 0)
        self._after: dict[int, Any] = {}
        self._unit_tokens = 0

    def compute(self, layer: int, end: int, event: Any = None) -> None:
        """Tokens before `end` of one layer are in P's cache once `event` is done."""
        if end > self._ready[layer]:
            self._ready[layer] = min(end, self._num_tokens)
            if event is not None:
                self._after[layer] = event

    def compute_all(self, end: int, event: Any = None) -> None:
        """The same of every layer, e.g. P's prefix hit from before this step."""
        for layer in self._ready:
            self.compute(layer, end, event)

    def reserve(self, num_cached: int, unit_tokens: int) -> None:
        """D has the first `num_cached` tokens; from now on batches can be taken."""
        self._unit_tokens = unit_tokens
        for layer in self._sent:
            self._sent[layer] = max(self._sent[layer], min(num_cached, self._num_tokens))

    def take(self) -> list[Batch]:
        """What can be sent now, counted as sent."""
        if not self._unit_tokens:
            return []
        spans: dict[tuple[int, int], list[int]] = {}
        for layer, sent in self._sent.items():
            first, end = ready_range(sent, self._ready[layer], self._num_tokens, self._unit_tokens)
            if end > first:
                spans.setdefault((first, end), []).append(layer)
                self._sent[layer] = end
        return [
            Batch(frozenset(layers), first, end, tuple(self._after[n] for n in layers if n in self._after))
            for (first, end), layers in spans.items()
        ]

    def rewind(self) -> None:
        """Preempted: what was computed and not sent is gone with the blocks."""
        for layer, sent in self._sent.items():
            self._ready[layer] = min(self._ready[layer], sent)
        self._after.clear()

    @property
    def computed(self) -> bool:
        """Every layer of the whole prompt is in P's cache."""
        return all(end == self._num_tokens for end in self._ready.values())

    @property
    def complete(self) -> bool:
        """Every layer of the whole prompt was taken, or is D's own."""
        return bool(self._unit_tokens) and all(sent == self._num_tokens for sent in self._sent.values())
