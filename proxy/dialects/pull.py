"""Our pull connector: P answers where its blocks are, D reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_pd.errors import LocalProtocolError, RemoteProtocolError
from ascend_pd.wire.params import PullHandoff, PullPrefill, parse_params, to_dict
from proxy.address import bracketed
from proxy.dialects.base import Handoff, Hold, Order


class Pull:
    """`MooncakeConnector` of `connectors`."""

    name = "pull"
    order = Order.PREFILL_FIRST
    prefill_fields: Mapping[str, Any] = {}

    def prefill_params(self, transfer_id: str, metaserver: str) -> dict[str, Any]:
        return to_dict(PullPrefill(transfer_id=transfer_id))

    def decode_params(self, transfer_id: str, metaserver: str) -> dict[str, Any]:
        raise LocalProtocolError("pull: D cannot come first")

    def handoff(self, params: object, transfer_id: str) -> Handoff:
        if not isinstance(params, dict):
            raise RemoteProtocolError("no kv_transfer_params in the answer: is the connector loaded there?")
        read = parse_params(params)
        if not isinstance(read, PullHandoff):
            raise RemoteProtocolError("prefill answered kv_transfer_params that are no handoff")
        if read.transfer_id != transfer_id:
            raise RemoteProtocolError(f"prefill answered for transfer {read.transfer_id}, asked was {transfer_id}")
        host = bracketed(read.remote_host)
        hold = Hold(
            transfer_id=transfer_id,
            epoch=read.remote_epoch,
            side=f"{host}:{read.remote_port}",
            lease_s=read.lease_seconds,
        )
        return Handoff(params=params, hold=hold, prompt_tokens=read.num_prompt_tokens)
