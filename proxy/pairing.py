"""May this prefill engine and that decode engine exchange KV cache? Judged from what their side channels said. Pure."""

from __future__ import annotations

from collections import OrderedDict

from ascend_pd.layout.geometry import Mode, geometry, judge
from ascend_pd.wire.identity import mismatches
from ascend_pd.wire.messages import HelloReply

MAX_REMEMBERED = 65536


def objections(prefill: HelloReply, decode: HelloReply, mode: Mode) -> str:
    """Everything against the pair, each with the field and both values; empty when nothing is.

    Layouts are judged once both engines' workers are known, by the rules that preflight and connectors use.
    """
    found = [str(mismatch) for mismatch in mismatches(prefill.fingerprint, decode.fingerprint)]
    if not found and prefill.workers and decode.workers:
        source = geometry(prefill.workers[0].layout, prefill.fingerprint.num_layers)
        sink = geometry(decode.workers[0].layout, decode.fingerprint.num_layers)
        found = [str(refusal) for refusal in judge(source, sink, mode)]
    return "; ".join(found)


class Pairing:
    """Remembers its judgements: engines are asked about at every request and change only with their epoch."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._judged: OrderedDict[tuple[str, str, bool, bool], str] = OrderedDict()

    def misfit(self, prefill: HelloReply | None, decode: HelloReply | None) -> str:
        """Why the two may not be paired; empty when they may, or while one of them has not been heard of."""
        if prefill is None or decode is None:
            return ""
        key = (prefill.engine.epoch, decode.engine.epoch, bool(prefill.workers), bool(decode.workers))
        known = self._judged.get(key)
        if known is None:
            known = self._judged[key] = objections(prefill, decode, self._mode)
            while len(self._judged) > MAX_REMEMBERED:
                self._judged.popitem(last=False)
        return known
