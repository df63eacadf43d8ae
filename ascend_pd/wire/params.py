"""`kv_transfer_params`: what the proxy and the engines tell each other inside an OpenAI request or response.

The field names at vLLM's boundary (do_remote_prefill, do_remote_decode, remote_engine_id, remote_block_ids,
remote_host, remote_port) are vLLM's own, so that its logs and metrics stay readable.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ascend_pd.errors import RemoteProtocolError
from ascend_pd.wire import WIRE_VERSION


class PullPrefill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Proxy → P, pull mode: compute this prompt and hold its blocks for `readers` decode requests."""

    transfer_id: str
    do_remote_decode: bool = True
    do_remote_prefill: bool = False
    wire_version: int = WIRE_VERSION


class PullHandoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """P → proxy → D, pull mode: where the blocks are and for how long."""

    transfer_id: str
    remote_engine_id: str
    remote_epoch: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[list[int]]
    """Per KV cache group, in token order; the last block may be partly filled."""
    remote_block_size: int
    remote_tp_size: int
    num_prompt_tokens: int
    prompt_hash: str
    lease_seconds: float
    """Duration from when P answered; renewed through the side channel."""
    remote_prefill_cached_tokens: int | None = None
    """Added by P's vLLM: prompt tokens that P had cached; D's vLLM reports them in `usage`."""
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    wire_version: int = WIRE_VERSION


class LayerwiseDecode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Proxy → D, layer-wise mode: reserve blocks and post the reservation to `metaserver` (a base URL)."""

    transfer_id: str
    metaserver: str
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    wire_version: int = WIRE_VERSION


class LayerwisePrefill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Proxy → P, layer-wise mode: compute this prompt and push it to whoever reserved `transfer_id`.

    P starts computing at once and asks `metaserver` (a base URL) for the reservation.
    """

    transfer_id: str
    metaserver: str
    do_remote_decode: bool = True
    do_remote_prefill: bool = False
    wire_version: int = WIRE_VERSION


TransferId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]


class Reservation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """D → metaserver → P, layer-wise mode: the blocks that D keeps for one transfer."""

    transfer_id: TransferId
    sink_engine_id: Name
    sink_epoch: Name
    sink_host: Host
    sink_port: Port
    block_ids: Annotated[list[list[Natural]], msgspec.Meta(min_length=1)]
    """Per KV cache group, in token order, the blocks D already has (its prefix hit) included."""
    block_size: Positive
    tp_size: Positive
    num_prompt_tokens: Positive
    num_cached_tokens: Natural
    """Tokens that D already has in its prefix cache: P sends only what comes after them."""
    prompt_hash: Name
    endpoints: Natural = 0
    """D's `HelloReply.endpoints` when it reserved: P must know D's sessions of that time or later."""
    deadline_seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    """How long D waits from now before it gives the reservation up; the metaserver hands out what is left."""
    wire_version: Annotated[int, msgspec.Meta(ge=WIRE_VERSION, le=WIRE_VERSION)] = WIRE_VERSION

    def __post_init__(self) -> None:
        if self.num_cached_tokens > self.num_prompt_tokens:
            raise ValueError(
                f"num_cached_tokens {self.num_cached_tokens} exceeds num_prompt_tokens {self.num_prompt_tokens}"
            )


Params = PullPrefill | PullHandoff | LayerwiseDecode | LayerwisePrefill


def _shape_of(raw: dict[str, Any]) -> type[PullPrefill | PullHandoff | LayerwiseDecode | LayerwisePrefill]:
    layerwise = "metaserver" in raw
    if raw.get("do_remote_decode"):
        return LayerwisePrefill if layerwise else PullPrefill
    if raw.get("do_remote_prefill"):
        return LayerwiseDecode if layerwise else PullHandoff
    raise RemoteProtocolError("kv_transfer_params asks neither for do_remote_prefill nor for do_remote_decode")


def parse_params(raw: dict[str, Any]) -> Params:
    """Read a `kv_transfer_params` object.

    Raises:
        RemoteProtocolError: unknown field, wrong type, another wire version; the message names the field.
    """
    if raw.get("wire_version", WIRE_VERSION) != WIRE_VERSION:
        raise RemoteProtocolError(
            f"kv_transfer_params has wire_version {raw['wire_version']!r}, this side speaks {WIRE_VERSION}"
        )
    if raw.get("do_remote_decode") and raw.get("do_remote_prefill"):
        raise RemoteProtocolError("kv_transfer_params asks for do_remote_prefill and do_remote_decode at once")
    try:
        return msgspec.convert(raw, _shape_of(raw))
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(f"kv_transfer_params: {error}") from error


def to_dict(params: Params | Reservation) -> dict[str, Any]:
    """The plain JSON-able form, as it goes into an OpenAI body or to the metaserver."""
    plain: dict[str, Any] = msgspec.to_builtins(params)
    return plain


def parse_reservation(raw: bytes) -> Reservation:
    """Read a reservation from JSON.

    Raises:
        RemoteProtocolError: not a reservation; the message names the field.
    """
    try:
        return msgspec.json.decode(raw, type=Reservation)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"reservation: {error}") from error
