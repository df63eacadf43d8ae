"""vLLM's own NixlConnector (pull): the order of ours, without lease, transfer id or side channel.

Shapes as in vLLM 0.32, `distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_pd.errors import LocalProtocolError, RemoteProtocolError
from proxy.dialects.base import Handoff, Hold, Order

REQUEST = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NEEDED = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


class Nixl:
    """Passes P's answer on as it is."""

    name = "nixl"
    order = Order.PREFILL_FIRST
    prefill_fields: Mapping[str, Any] = {}

    def prefill_params(self, transfer_id: str, metaserver: str) -> dict[str, Any]:
        return dict(REQUEST)

    def decode_params(self, transfer_id: str, metaserver: str) -> dict[str, Any]:
        raise LocalProtocolError(f"{self.name}: D cannot come first")

    def handoff(self, params: object, transfer_id: str) -> Handoff:
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            raise RemoteProtocolError("no handoff in the answer: is the connector loaded there?")
        missing = [name for name in _NEEDED if params.get(name) is None]
        if missing:
            raise RemoteProtocolError(f"the handoff lacks {', '.join(missing)}")
        return Handoff(
            params=params, hold=Hold(transfer_id), prompt_tokens=_count(params.get("remote_num_tokens"))
        )


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
