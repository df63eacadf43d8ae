"""The passive end's plans with its peers, made of the layouts that they send."""

from __future__ import annotations

from collections import OrderedDict

from ascend_pd.errors import RemoteProtocolError
from ascend_pd.layout.description import KVLayout
from ascend_pd.layout.geometry import senders
from ascend_pd.layout.plan import PairPlan, pair

MAX_PLANS = 256


class PairPlans:
    """One per worker; remembers the plans used last. Not thread-safe.

    Args:
        layout: this worker's.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._plans: OrderedDict[tuple[KVLayout, bool, int], PairPlan] = OrderedDict()

    def plan(self, other: KVLayout, choice: int, *, push: bool) -> PairPlan:
        """What moves between this worker and a peer.

        Args:
            other: the peer's layout; `push`: the peer is the source.
            choice: which of the equally good choices of senders.

        Raises:
            RemoteProtocolError: nothing does in this choice.
            PairingError: the two layouts do not go together.
        """
        source, sink = (other, self._layout) if push else (self._layout, other)
        heads = 1 if source.mla else source.num_kv_heads
        choices = senders(heads, source.tp_size, sink.tp_size, sink.tp_rank)
        key = (other, push, choice % len(choices))
        known = self._plans.get(key)
        if known is None:
            mine = choices[key[2]].get(source.tp_rank)
            if mine is None:
                ranks = f"rank {source.tp_rank} of prefill sends nothing to rank {sink.tp_rank} of decode"
                raise RemoteProtocolError(f"{ranks} in choice {key[2]}")
            known = self._plans[key] = pair(source, sink, mine)
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return known
