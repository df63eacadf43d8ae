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
    dialect: str = ""
    """How its connector spells handoffs; empty means the process's dialect. Pairs are of one dialect."""


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names from `proxy.policy.POLICIES`, and the thresholds of conditional prefill."""

    prefill: str = "least-tokens"
    decode: str = "least-tokens"
    local_prefill_below_tokens: int = 0
    """Prompts shorter than this skip P and are prefilled where they are decoded; 0 never skips."""
    reuse_prompt_tokens: bool = False
    """D takes the prompt as P tokenised it. Needs engines that return and accept token ids (vLLM 0.32; not 0.23)."""
    fallback: str = "local"
    """Who serves what P/D cannot: `union` (a union instance), `local` (that, else D prefills itself), `none`."""


class TimeoutSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations in seconds."""

    body_s: float = 120.0
    """From the end of a request's head to the end of its body; beyond that 408."""
    connect_s: float = 3.0
    prefill_s: float = 300.0
    """From sending P's request to its whole answer."""
    first_event_s: float = 120.0
    """From sending D's request to its first event (streaming) or whole answer's first byte."""
    inter_token_s: float = 60.0
    """Between two pieces of D's answer."""
    request_s: float = 1800.0
    """The whole request, the client's reading included."""
    lame_duck_s: float = 0.0
    """How long after SIGTERM a stopping proxy goes on listening and answers 503, so that balancers see it leave; set it
    to what they take to notice (their interval times their failures). 0 closes the listener at once."""
    drain_s: float = 60.0
    """How long a stopping proxy lets open answers finish once it listens no more."""


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one API key; 0 is none."""

    max_running: int = 0
    requests_per_minute: int = 0


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many requests are let in."""

    max_running: int = 2048
    max_queued: int = 512
    queue_s: float = 30.0
    max_body_bytes: int = 32 << 20
    split_at_once: int = 16
    """Members of one split request that run at a time."""


class ProbeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How instances are watched."""

    interval_s: float = 5.0
    """0 switches the probes off."""
    timeout_s: float = 3.0
    failures: int = 2
    """So many failed probes in a row take an instance out; one good one takes it back."""


class ObservabilitySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the process tells about itself."""

    access_log: bool = True
    """One JSON line per request on standard output."""
    records: int = 1000
    """How many requests' records are kept."""
    stories_per_second: float = 10.0
    """How many requests a second have their phases completed from the connectors' own measurements."""
    expose_records: bool = False
    """`/debug/records` also on the public listener."""
    otlp_endpoint: str = ""
    """OTLP/HTTP collector, e.g. `http://collector:4318`; empty switches spans off."""
    service_name: str = "ascend-pd-proxy"


class ListenerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Security of the listeners, and the administrators' own one."""

    api_key_file: str = ""
    """Empty lets every client in."""
    tls_certificate: str = ""
    tls_key: str = ""
    engine_key_file: str = ""
    """The key that engines started with `--api-key` want, as plain text in a file only this process may read."""
    engine_ca: str = ""
    """CA bundle for https engines; empty takes the system's."""
    admin_host: str = "127.0.0.1"
    admin_port: int = 0
    """0 opens no admin listener."""
    admin_key_file: str = ""


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
    secret_file: str = ""
    """The shared secret of side channel and metaserver."""
    retries: int = 2
    """Further attempts of a request of which no byte has gone to the client."""
    admission: AdmissionSettings = AdmissionSettings()
    probes: ProbeSettings = ProbeSettings()
    observability: ObservabilitySettings = ObservabilitySettings()
    listener: ListenerSettings = ListenerSettings()
