"""vllm-ascend's layer-wise connector, `MooncakeLayerwiseConnector`: D reserves and calls the proxy back at
`/v1/metaserver`; the proxy then sends P its leg with D's message, and answers D when P has finished.

The call-back URL carries a token of this attempt, so that nobody else can name engine addresses to P, and so that
request ids need not be matched by cutting off suffixes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_pd.errors import LocalProtocolError, RemoteProtocolError
from proxy.dialects.base import Handoff, Order

_NEEDED = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


class AscendLayerwise:
    """`metaserver` is the call-back URL of the attempt."""

    name = "ascend-layerwise"
    order = Order.CALLED_BACK
    prefill_fields: Mapping[str, Any] = {"min_tokens": 1}

    def prefill_params(self, transfer_id: str, metaserver: str) -> dict[str, Any]:
        raise LocalProtocolError(f"{self.name}: P gets what D calls back with")

    def decode_params(self, transfer_id: str, metaserver: str) -> dict[str, Any]:
        return {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": metaserver}

    def handoff(self, params: object, transfer_id: str) -> Handoff:
        raise LocalProtocolError(f"{self.name}: P's answer carries no handoff")


def checked_reservation(message: object) -> dict[str, Any]:
    """D's message, fit to be P's kv_transfer_params.

    Raises:
        RemoteProtocolError: it is none.
    """
    if not isinstance(message, dict) or not message.get("do_remote_decode"):
        raise RemoteProtocolError("the call-back asks for no remote decode")
    missing = [name for name in _NEEDED if message.get(name) is None]
    if missing:
        raise RemoteProtocolError(f"the call-back lacks {', '.join(missing)}")
    return message
