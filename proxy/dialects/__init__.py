"""The registry of handoff dialects."""

from __future__ import annotations

from ascend_pd.errors import OperatorError
from proxy.dialects.base import Dialect, Handoff, Hold, Order
from proxy.dialects.layerwise import Layerwise
from proxy.dialects.pull import Pull

DIALECTS: dict[str, type[Dialect]] = {"pull": Pull, "layerwise": Layerwise}

__all__ = ["DIALECTS", "Dialect", "Handoff", "Hold", "Order", "dialect_named"]


def dialect_named(name: str) -> Dialect:
    """A dialect by its registered name.

    Raises:
        OperatorError: unknown name.
    """
    if name not in DIALECTS:
        raise OperatorError(f"dialect {name!r} is unknown", f"one of {', '.join(sorted(DIALECTS))}")
    return DIALECTS[name]()
