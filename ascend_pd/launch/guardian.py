"""A small process between the supervisor and one role, so that the role never outlives either of them.

    python -m ascend_pd.launch.guardian [--grace S] [--orphan-grace S] [--lifeline] -- COMMAND …

vLLM's API server starts an engine core, which starts workers; killed hard, it leaves them and their ports behind.
The guardian adopts every orphan of the tree below it (PR_SET_CHILD_SUBREAPER) and ends them all when

* the role's first process ends, however it ends,
* it is told to stop (SIGTERM, SIGINT), or
* with `--lifeline`, its standard input closes: the supervisor that holds the other end is gone, kill -9 included.

Its exit code is the role's, 128 + N when signal N ended it. It does no more than this and imports next to nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 10.0
"""A role that is told to stop gets this long to do so in order."""
ORPHAN_GRACE_S = 2.0
"""What is left of a role whose first process is gone gets this long to end by itself."""
_POLL_S = 0.2


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _die_with_guardian() -> None:
    """Between fork and exec of the role: if even the guardian is killed, its first process goes too."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """All live processes below `root`, parents before their children; zombies are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the command's name, which may hold anything and ends with the last parenthesis: state, parent.
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def _is_resource_tracker(pid: int) -> bool:
    """Python's own cleaner of shared memory: it ends by itself once those it serves are gone."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def reap() -> None:
    """Collect every child that has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _wait_until_none(deadline: float) -> bool:
    while True:
        reap()
        if not descendants(os.getpid()):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)


def end_all(grace_s: float) -> None:
    """End every process below this one: asked first, then killed; returns when none is left.

    A process may fork while it is being killed: its child then turns up here, adopted, in the next round.
    """
    _signal(descendants(os.getpid()), signal.SIGTERM)
    if _wait_until_none(time.monotonic() + grace_s):
        return
    _signal([pid for pid in descendants(os.getpid()) if not _is_resource_tracker(pid)], signal.SIGKILL)
    deadline = time.monotonic() + grace_s
    while not _wait_until_none(deadline):
        _signal(descendants(os.getpid()), signal.SIGKILL)
        deadline = time.monotonic() + _POLL_S


class _StopFlag:
    """Set by a signal. A flag, because an exception out of a handler could strike between fork and bookkeeping."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True


def guard(
    command: Sequence[str],
    *,
    grace_s: float = GRACE_S,
    orphan_grace_s: float = ORPHAN_GRACE_S,
    lifeline: int | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a command until it ends, then end everything it left; returns its exit code.

    Args:
        lifeline: a file descriptor whose end of file means that the supervisor is gone; None without one.
        env: the whole environment of the command; None for this process's own.
    """
    adopt_orphans()
    stop = _StopFlag()
    try:
        role = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guardian, start_new_session=True
        )
    except OSError as error:
        print(f"guardian: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    code = _wait_for_end(role, stop, lifeline)
    if code is None:
        code = _stop_role(role, grace_s)
    end_all(orphan_grace_s)
    return code if code >= 0 else 128 - code


def _stop_role(role: subprocess.Popen[bytes], grace_s: float) -> int:
    """Ask the role's first process alone: it knows in which order to stop the rest."""
    role.terminate()
    try:
        return role.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        role.kill()
        return role.wait()


def _wait_for_end(role: subprocess.Popen[bytes], stop: _StopFlag, lifeline: int | None) -> int | None:
    """The role's exit code, or None when it is to be stopped."""
    while not stop.is_set:
        if lifeline is None:
            time.sleep(_POLL_S)
        elif select.select([lifeline], [], [], _POLL_S)[0] and not os.read(lifeline, 4096):
            return None
        code = role.poll()
        if code is not None:
            return code
        _reap_orphans(role.pid)
    return None


def _reap_orphans(role_pid: int) -> None:
    """Collect adopted children that ended, but never the role, whose exit code is wanted."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == role_pid:
                return
            os.waitpid(ended.si_pid, 0)
        except ChildProcessError:
            return


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: the role's."""
    parser = argparse.ArgumentParser(prog="python -m ascend_pd.launch.guardian")
    parser.add_argument("--grace", type=float, default=GRACE_S, metavar="SECONDS")
    parser.add_argument("--orphan-grace", type=float, default=ORPHAN_GRACE_S, metavar="SECONDS")
    parser.add_argument("--lifeline", action="store_true", help="stop when standard input closes")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    return guard(
        args.command,
        grace_s=args.grace,
        orphan_grace_s=args.orphan_grace,
        lifeline=0 if args.lifeline else None,
    )


if __name__ == "__main__":
    sys.exit(main())
