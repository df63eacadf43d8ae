"""The metaserver's settings: one frozen object per process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Bounds and secret; `secret` is kept out of `repr`."""

    secret: bytes = field(default=b"", repr=False)
    max_reservations: int = 65536
    max_bytes: int = 256 << 20
    """Of reservations as they were posted; in memory they take about four times as much."""
    max_body_bytes: int = 4 << 20
    max_waits: int = 65536
    max_wait_s: float = 60.0
    max_engines: int = 4096
    body_timeout_s: float = 10.0
    """How long a client may take to send its body."""
