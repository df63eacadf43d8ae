"""What happened to one request, and how its time splits into the phases operators ask for. Pure.

    proxy     receiving, admission, choosing instances, and the way back
    p_queue   P had it but did not compute
    prefill   P computed
    transfer  the cache moved
    d_queue   D had it, but neither received nor computed
    first     D's step that made the first token
    decode    the remaining tokens

The instants are the proxy's own; what lies inside a leg is told by the connectors' stories where they can be had.
Without them all of P's leg is `prefill` and all of D's up to its first token is `first`.
"""

from __future__ import annotations

import msgspec

from ascend_pd.wire.messages import Story

PHASES = ("proxy", "p_queue", "prefill", "transfer", "d_queue", "first", "decode")


class Record(msgspec.Struct, kw_only=True):
    """Filled in while the exchange runs; instants are monotonic seconds, 0 for not reached."""

    request_id: str
    transfer_id: str = ""
    path: str = ""
    key: str = ""
    """Name of the API key."""
    model: str = ""
    stream: bool = False
    route: str = ""
    status: int = 0
    error: str = ""
    attempts: int = 0
    """Of a split request, those of all its members."""
    retries: int = 0
    prefill: str = ""
    decode: str = ""
    received_at: float = 0.0
    prefill_sent_at: float = 0.0
    prefill_done_at: float = 0.0
    decode_sent_at: float = 0.0
    first_event_at: float = 0.0
    ended_at: float = 0.0
    prompt_tokens: int = 0
    events: int = 0
    prefill_side: str = ""
    decode_side: str = ""
    prefill_story: Story | None = None
    decode_story: Story | None = None

    def bytes_moved(self) -> int:
        """KV cache bytes of this transfer, as the engine that moved them counted."""
        return max(_bytes(self.decode_story), _bytes(self.prefill_story))

    def e2e_ms(self) -> float:
        """From receipt to the last byte."""
        return 1e3 * (self.ended_at - self.received_at)

    def phases_ms(self) -> dict[str, float]:
        """Durations by phase; their sum is `e2e_ms`. Where legs overlap (layer-wise), D's begins at P's end."""
        first_at = self.first_event_at or self.ended_at
        done_at = min(self.prefill_done_at, first_at)
        p_leg = max(0.0, 1e3 * (done_at - self.prefill_sent_at)) if self.prefill_done_at else 0.0
        d_began_at = max(self.decode_sent_at, done_at)
        d_leg = max(0.0, 1e3 * (first_at - d_began_at)) if self.decode_sent_at else 0.0
        decode = 1e3 * (self.ended_at - first_at) if self.first_event_at else 0.0
        prefill = min(p_leg, _told(self.prefill_story, "prefill", p_leg))
        moved = _told(self.prefill_story, "exposed", _told(self.decode_story, "transfer", 0.0))
        phases = dict.fromkeys(PHASES, 0.0)
        phases["prefill"] = prefill
        phases["p_queue"] = p_leg - prefill
        phases["transfer"] = min(d_leg, moved)
        phases["d_queue"] = min(d_leg - phases["transfer"], _told(self.decode_story, "decode_queue", 0.0))
        phases["first"] = d_leg - phases["transfer"] - phases["d_queue"]
        phases["decode"] = decode
        phases["proxy"] = max(0.0, self.e2e_ms() - p_leg - d_leg - decode)
        return phases

    def tpot_ms(self) -> float:
        """Time per output event after the first; 0 when there was at most one."""
        if self.events < 2 or not self.first_event_at:
            return 0.0
        return 1e3 * (self.ended_at - self.first_event_at) / (self.events - 1)

    def view(self) -> dict[str, object]:
        """The JSON form, without instants."""
        ttft = 1e3 * (self.first_event_at - self.received_at) if self.first_event_at else None
        return {
            "request_id": self.request_id,
            "transfer_id": self.transfer_id,
            "path": self.path,
            "key": self.key,
            "model": self.model,
            "stream": self.stream,
            "route": self.route,
            "status": self.status,
            "error": self.error,
            "attempts": self.attempts,
            "retries": self.retries,
            "prefill": self.prefill,
            "decode": self.decode,
            "prompt_tokens": self.prompt_tokens,
            "output_events": self.events,
            "kv_bytes": self.bytes_moved(),
            "e2e_ms": round(self.e2e_ms(), 3),
            "ttft_ms": None if ttft is None else round(ttft, 3),
            "tpot_ms": round(self.tpot_ms(), 3),
            "phases_ms": {name: round(value, 3) for name, value in self.phases_ms().items()},
            "prefill_story": _story_view(self.prefill_story),
            "decode_story": _story_view(self.decode_story),
        }


def _told(story: Story | None, name: str, otherwise: float) -> float:
    return max(0.0, story.timings_ms.get(name, otherwise)) if story is not None else otherwise


def _bytes(story: Story | None) -> int:
    return story.bytes_moved if story is not None else 0


def _story_view(story: Story | None) -> object:
    return msgspec.to_builtins(story) if story is not None and story.known else None
