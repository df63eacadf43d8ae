"""Our layer-wise connector: D reserves, P pushes; the two find each other at the metaserver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_pd.errors import LocalProtocolError
from ascend_pd.wire.params import LayerwiseDecode, LayerwisePrefill, to_dict
from proxy.dialects.base import Handoff, Order


class Layerwise:
    """`MooncakeLayerwiseConnector` of `connectors`."""

    name = "layerwise"
    order = Order.DECODE_FIRST
    prefill_fields: Mapping[str, Any] = {}

    def prefill_params(self, transfer_id: str, metaserver: str) -> dict[str, Any]:
        return to_dict(LayerwisePrefill(transfer_id=transfer_id, metaserver=metaserver))

    def decode_params(self, transfer_id: str, metaserver: str) -> dict[str, Any]:
        return to_dict(LayerwiseDecode(transfer_id=transfer_id, metaserver=metaserver))

    def handoff(self, params: object, transfer_id: str) -> Handoff:
        raise LocalProtocolError("layerwise: P's answer carries no handoff")
