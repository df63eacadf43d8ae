"""What an engine says of itself to the metaserver, again and again while it lives."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ascend_pd.errors import RemoteProtocolError
from ascend_pd.wire import WIRE_VERSION
from ascend_pd.wire.params import Host, Name, Port


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine → metaserver → proxy: I live here for another `ttl_seconds`. A new epoch replaces the one before."""

    engine_id: Name
    epoch: Name
    role: Literal["prefill", "decode", "union"]
    host: Host
    side_channel_port: Port
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0, le=600)] = 30.0
    wire_version: Annotated[int, msgspec.Meta(ge=WIRE_VERSION, le=WIRE_VERSION)] = WIRE_VERSION


def parse_engine_entry(raw: bytes) -> EngineEntry:
    """Read an entry from JSON.

    Raises:
        RemoteProtocolError: not an entry; the message names the field.
    """
    try:
        return msgspec.json.decode(raw, type=EngineEntry)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"engine entry: {error}") from error
