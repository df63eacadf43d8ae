"""One running role: its guardian, its log, whether it answers."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ascend_pd.launch import guardian
from ascend_pd.launch.plan import ProcessPlan
from ascend_pd.launch.site import full_environment

_TAIL_BYTES = 64 << 10
_STOP_MARGIN_S = 10.0
"""Past a guardian's own bounds; it is killed when even that is over."""


@dataclass(frozen=True, slots=True)
class Grace:
    """How long a role gets to stop in order, and what it leaves behind to end by itself. Seconds."""

    role_s: float = guardian.GRACE_S
    orphan_s: float = guardian.ORPHAN_GRACE_S


class RoleProcess:
    """A started process of a plan. Its guardian ends it when this process is gone, however that happens."""

    def __init__(self, plan: ProcessPlan, log: Path, grace: Grace) -> None:
        self.plan = plan
        self.log = log
        self.is_ready = False
        self.started_at = time.monotonic()
        self._grace = grace
        graces = ["--grace", str(grace.role_s), "--orphan-grace", str(grace.orphan_s)]
        command = [sys.executable, "-m", "ascend_pd.launch.guardian", "--lifeline", *graces]
        with log.open("wb") as output:
            self._guardian = subprocess.Popen(
                [*command, "--", *plan.argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=full_environment(plan, os.environ),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The guardian's process id."""
        return self._guardian.pid

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started_at

    def exit_code(self) -> int | None:
        """The role's exit code; None while it runs."""
        return self._guardian.poll()

    def answers(self, timeout_s: float = 2.0) -> bool:
        """Whether its server answers now."""
        return answers(self.plan, timeout_s)

    def ask_to_stop(self) -> None:
        """Close the lifeline: the guardian stops the role. Returns at once; may be repeated."""
        if self._guardian.stdin is not None and not self._guardian.stdin.closed:
            self._guardian.stdin.close()

    def wait_stopped(self) -> None:
        """Return once the role and all it started are gone; bounded."""
        try:
            self._guardian.wait(self._grace.role_s + self._grace.orphan_s + _STOP_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()

    def tail(self, lines: int) -> list[str]:
        """The last lines of its log that are not empty."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = stream.read().decode(errors="replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def answers(plan: ProcessPlan, timeout_s: float) -> bool:
    """Whether the plan's server answers 200 on its ready path."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(plan.host, plan.host)
    connection = http.client.HTTPConnection(host, plan.port, timeout=timeout_s)
    try:
        connection.request("GET", plan.ready_path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def ending(code: int) -> str:
    """An exit code in words; a negative one is of the guardian itself."""
    if code < 0:
        return f"lost its guardian to {signal.Signals(-code).name}"
    if code > 128:
        try:
            return f"was killed by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"ended with exit code {code}"
