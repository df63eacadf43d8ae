"""The registry of handoff dialects."""

from __future__ import annotations

from ascend_pd.errors import OperatorError
from proxy.dialects.ascend_layerwise import AscendLayerwise
from proxy.dialects.ascend_pull import AscendPull
from proxy.dialects.base import Dialect, Handoff, Hold, Order
from proxy.dialects.layerwise import Layerwise
from proxy.dialects.nixl import Nixl
from proxy.dialects.pull import Pull

DIALECTS: dict[str, type[Dialect]] = {
    "ascend-layerwise": AscendLayerwise,
    "ascend-pull": AscendPull,
    "layerwise": Layerwise,
    "nixl": Nixl,
    "pull": Pull,
}

__all__ = ["DIALECTS", "Dialect", "Handoff", "Hold", "Order", "dialect_named"]


def dialect_named(name: str) -> Dialect:
    """A dialect by its registered name.

    Raises:
        OperatorError: unknown name.
    """
    if name not in DIALECTS:
        raise OperatorError(f"dialect {name!r} is unknown", f"one of {', '.join(sorted(DIALECTS))}")
    return DIALECTS[name]()
