"""What reading the files again can change in a process that serves, and what takes a restart. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.settings import Role, Settings

_FIRM = ("host", "port", "mode", "dialect", "metaserver", "secret_file", "listener")
"""Who listens where and how engines are talked to: instances of such a file would not fit this process."""


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """Fields, as `--set` names them, in which the files differ from what the process was started with."""

    firm: tuple[str, ...]
    """With these the file describes another proxy: none of it may be followed."""
    deferred: tuple[str, ...]
    """These are taken up at the next start."""


def unfollowed(running: Settings, read: Settings) -> Unfollowed:
    """All differences but those in the instances."""
    old, new = (_flat(msgspec.to_builtins(settings)) for settings in (running, read))
    names = [name for name in old if old[name] != new[name]]
    if (running.dialect or running.mode) == (read.dialect or read.mode) and "dialect" in names:
        names.remove("dialect")  # spelled out or not
    firm = tuple(name for name in names if name.partition(".")[0] in _FIRM)
    return Unfollowed(firm, tuple(name for name in names if name not in firm))


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif prefix or name not in set(Role):
            flat[prefix + name] = value
    return flat
