"""What one proxy process was told: a frozen object, made once by `proxy.load`."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Role(StrEnum):
    """What an instance does. A union instance prefills and decodes by itself."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNION = "union"


class InstanceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One OpenAI endpoint of an engine."""

    url: str
    """Base URL without `/v1`."""
    side: str = ""
    """`host:port` of the engine's side channel; empty when it is not known or not ours."""
    dp_rank: int | None = None
    """Data-parallel rank behind this URL that this instance stands for; None lets the engine choose."""


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names from `proxy.policy.POLICIES`, and the thresholds of conditional prefill."""

    prefill: str = "least-tokens"
    decode: str = "least-tokens"
    local_prefill_below_tokens: int = 0
    """Prompts shorter than this skip P and are prefilled where they are decoded; 0 never skips."""
    fallback: str = "union"
    """When P/D cannot serve a request: `union` (a union instance), `local` (union, else prefill on D), `none`."""


class TimeoutSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations in seconds."""

    connect_s: float = 3.0
    prefill_s: float = 300.0
    """From sending P's request to its whole answer."""
    first_event_s: float = 120.0
    """From sending D's request to its first event (streaming) or whole answer's first byte."""
    inter_token_s: float = 60.0
    """Between two pieces of D's answer."""
    request_s: float = 1800.0
    """The whole request, the client's reading included."""
    drain_s: float = 60.0
    """How long a stopping proxy lets open answers finish."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the process was told."""

    host: str = "127.0.0.1"
    port: int = 8000
    mode: str = "pull"
    """`pull` or `layerwise`; the order of the two legs."""
    dialect: str = ""
    """How handoffs are spelled, from `proxy.dialects.DIALECTS`; empty means the mode's own."""
    prefill: tuple[InstanceSettings, ...] = ()
    decode: tuple[InstanceSettings, ...] = ()
    union: tuple[InstanceSettings, ...] = ()
    metaserver: str = ""
    """Base URL, as engines and this process reach it (layer-wise mode)."""
    policy: PolicySettings = PolicySettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    retries: int = 2
    """Further attempts of a request of which no byte has gone to the client."""
    max_body_bytes: int = 32 << 20
