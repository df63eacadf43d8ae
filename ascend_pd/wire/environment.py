"""The environment that an engine's process needs for its transport's library: set by the launcher, read by C++.

Mooncake 0.3.13 reads MC_LOG_LEVEL when the module is loaded, MC_TRANSFER_TIMEOUT when a TransferEngine is made,
the rest when it is initialised, the two TCP timers as late as at its first transfer (tried one by one).
"""

from __future__ import annotations

from collections.abc import Mapping

TRANSFER = "MC_TRANSFER_TIMEOUT"
STATUS = "MC_TCP_STATUS_TIMEOUT_SEC"
PROGRESS = "MC_TCP_PROGRESS_TIMEOUT_SEC"
QUEUE = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"

_DEFAULTS = {TRANSFER: 30, STATUS: 30, PROGRESS: 30, QUEUE: 1024}
"""The library's own."""
MIN_QUEUE = 1024
"""What `connectors.transport` keeps in flight towards one peer."""
MARGIN_S = 5
"""The library must give up an operation this much earlier than the call that waits for it: the other way round
the call returns, and bytes go on arriving."""


def mooncake_environment(protocol: str) -> dict[str, str]:
    """What the launcher adds to an engine whose transport is Mooncake; an operator's own values win over it."""
    common = {TRANSFER: "15", "MC_HANDSHAKE_CONNECT_TIMEOUT": "3", "MC_LOG_LEVEL": "ERROR"}
    if protocol != "tcp":
        return common
    return {**common, STATUS: "4", PROGRESS: "4", QUEUE: "65535"}


def mooncake_environment_problems(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What is wrong with an engine's environment, one line each; empty when nothing is."""
    values: dict[str, int] = {}
    problems: list[str] = []
    for name, default in _DEFAULTS.items():
        text = environ.get(name, "")
        if text and not text.isdecimal():
            problems.append(f"{name}={text!r} is not a whole number of seconds or requests")
        values[name] = int(text) if text.isdecimal() else default
    problems += [
        f"{name} ({values[name]} s) must be {MARGIN_S} s below {TRANSFER} ({values[TRANSFER]} s): "
        "else a transfer is given up while its bytes still arrive"
        for name in (STATUS, PROGRESS)
        if values[name] + MARGIN_S > values[TRANSFER]
    ]
    if values[QUEUE] < MIN_QUEUE:
        problems.append(f"{QUEUE} ({values[QUEUE]}) must be at least {MIN_QUEUE}, or a peer's connection wedges")
    return tuple(problems)
