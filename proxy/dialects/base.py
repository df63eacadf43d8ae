"""How a handoff is spelled between the proxy and a kind of connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class Order(StrEnum):
    """Which leg comes first."""

    PREFILL_FIRST = "prefill-first"
    DECODE_FIRST = "decode-first"
    CALLED_BACK = "called-back"
    """D first; P when D calls back."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Where P keeps the blocks of one transfer, as far as its answer told."""

    transfer_id: str
    epoch: str = ""
    side: str = ""
    """`host:port` of P's side channel; empty when the dialect has none that we may call."""
    lease_s: float = 0.0
    """0 when the hold cannot be renewed."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """P's answer, read: what D gets, and the hold to look after."""

    params: dict[str, Any]
    hold: Hold
    prompt_tokens: int = 0
    """0 when P did not say."""


class Dialect(Protocol):
    """Pure: makes and reads kv_transfer_params."""

    name: str
    order: Order
    prefill_fields: Mapping[str, Any]
    """What P's body needs beside one token and no stream."""

    def prefill_params(self, transfer_id: str, metaserver: str) -> dict[str, Any]:
        """What P gets."""

    def decode_params(self, transfer_id: str, metaserver: str) -> dict[str, Any]:
        """What D gets when it comes first."""

    def handoff(self, params: object, transfer_id: str) -> Handoff:
        """Read `kv_transfer_params` of P's answer.

        Raises:
            RemoteProtocolError: not what this dialect's P answers.
        """
