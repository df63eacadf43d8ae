"""The processes of a cluster on this machine: started together, watched together, stopped together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ascend_pd.errors import OperatorError
from ascend_pd.launch.plan import Kind, ProcessPlan
from ascend_pd.launch.role_process import Grace, RoleProcess, ending

READY_S = 900.0
"""Two engines on a busy two-core machine took up to three minutes; most of it is imports."""
HEARTBEAT_S = 15.0
_POLL_S = 0.25
_END_OF_LOG_LINES = 20

Report = Callable[[str], None]


class RoleEnded(OperatorError):
    """A role ended although nobody asked it to."""


class Supervisor:
    """Use as a context manager: leaving it stops every role.

    Args:
        report: gets one line per event.
    """

    def __init__(
        self, plans: Sequence[ProcessPlan], log_dir: Path, report: Report, grace: Grace | None = None
    ) -> None:
        self._plans = plans
        self._log_dir = log_dir
        self._report = report
        self._grace = grace or Grace()
        self.roles: list[RoleProcess] = []

    def start(self, ready_s: float = READY_S) -> None:
        """Start everything and return when all of it answers; the proxy comes last, when it has whom to talk to.

        Raises:
            RoleEnded: one ended; the end of its log was reported.
            OperatorError: one did not answer within `ready_s`, or the log directory cannot be written.
        """
        deadline = time.monotonic() + ready_s
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            for is_proxy in (False, True):
                stage = [plan for plan in self._plans if (plan.kind is Kind.PROXY) is is_proxy]
                for plan in stage:
                    self._start(plan)
                self._wait_ready(deadline)
        except OSError as error:
            raise OperatorError(f"cannot start: {error}", "name another log directory with --log-dir") from error

    def _start(self, plan: ProcessPlan) -> None:
        log = self._log_dir / f"{plan.name.replace('/', '-')}.log"
        role = RoleProcess(plan, log, self._grace)
        self.roles.append(role)
        self._report(f"{plan.name}: starting on port {plan.port}, log in {log}")

    def _wait_ready(self, deadline: float) -> None:
        told_at = time.monotonic()
        while waiting := [role for role in self.roles if not role.is_ready]:
            self.check()
            for role in waiting:
                if role.answers():
                    role.is_ready = True
                    self._report(f"{role.plan.name}: ready after {role.age_s:.0f} s")
            now = time.monotonic()
            if now >= deadline:
                names = ", ".join(role.plan.name for role in waiting)
                self._show_end_of_log(waiting[0])
                raise OperatorError(f"{names} did not answer in time", f"see {waiting[0].log}")
            if now - told_at >= HEARTBEAT_S:
                told_at = now
                for role in waiting:
                    self._report(f"{role.plan.name}: still starting, {role.age_s:.0f} s: {_last_line(role)}")
            time.sleep(_POLL_S)

    def check(self, settle_s: float = 0.0) -> None:
        """Look whether all roles still run: once, or for so many seconds.

        Raises:
            RoleEnded: one ended; the end of its log was reported.
        """
        deadline = time.monotonic() + settle_s
        while True:
            for role in self.roles:
                self._check_role(role)
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)

    def _check_role(self, role: RoleProcess) -> None:
        code = role.exit_code()
        if code is not None:
            self._show_end_of_log(role)
            raise RoleEnded(f"{role.plan.name} {ending(code)} after {role.age_s:.0f} s", f"see {role.log}")

    def watch(self) -> None:
        """Return never: until a role ends (RoleEnded), or the caller is interrupted (KeyboardInterrupt)."""
        while True:
            self.check()
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stop all roles, the proxy first, and return when none of their processes is left."""
        running = [role for role in reversed(self.roles) if role.exit_code() is None]
        if running:
            self._report(f"stopping {', '.join(role.plan.name for role in running)}")
        for role in running:
            role.ask_to_stop()
        for role in self.roles:
            role.ask_to_stop()
            role.wait_stopped()

    def _show_end_of_log(self, role: RoleProcess) -> None:
        lines = role.tail(_END_OF_LOG_LINES)
        self._report(f"{role.plan.name}: the end of its log:" if lines else f"{role.plan.name}: its log is empty")
        for line in lines:
            self._report(f"    {line}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _last_line(role: RoleProcess) -> str:
    return (role.tail(1) or ["nothing in its log yet"])[0][:120]
