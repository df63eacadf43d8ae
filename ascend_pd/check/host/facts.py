"""What was seen on one host: raw outputs and readings, serialisable, so that a site can be judged again
elsewhere.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MOONCAKE_IMPORT = "python -c 'import mooncake.engine'"
ADAPTER_IMPORT = "python -c 'import connectors.compat; print(connectors.compat.ADAPTER)'"
DEVICE_IMPORT = "python -c 'import connectors.device.npu'"

State = Literal["ran", "missing", "timeout"]


class CommandFacts(msgspec.Struct, frozen=True):
    """One run of a tool. `output` is standard output and error together."""

    state: State
    code: int = 0
    output: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The output's lines that are not blank."""
        return tuple(line.strip() for line in self.output.splitlines() if line.strip())


class PortFacts(msgspec.Struct, frozen=True):
    """One port that a process of ours will bind here."""

    port: int
    what: str
    path: str
    error: str = ""
    """Why it cannot be bound; empty when it can."""


class PackageFacts(msgspec.Struct, frozen=True):
    """Where `import NAME` would come from, and where ours is."""

    found: str
    ours: str


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything gathered. A field that was not asked for is empty; a missing tool says so in its command."""

    hostname: str
    pool: str = ""
    replica: int = 0
    commands: dict[str, CommandFacts] = {}
    """`hccn_tool -i 0 -link -g` → what it printed."""
    files: dict[str, str | None] = {}
    """Path → text; None when it cannot be read."""
    devices: tuple[str, ...] = ()
    """`/dev/davinciN` that exist."""
    packages: dict[str, str | None] = {}
    """Distribution → installed version."""
    shadows: dict[str, PackageFacts] = {}
    ports: tuple[PortFacts, ...] = ()
    model_dir: str = ""
    model_problem: str = ""
    """Why the model directory cannot be used; empty when it can."""
    disk_used_percent: dict[str, float] = {}
    shm_bytes: int | None = None
    peers: tuple[str, ...] = ()

    def command(self, name: str) -> CommandFacts | None:
        """A command's run, or None when it was not asked for."""
        return self.commands.get(name)
