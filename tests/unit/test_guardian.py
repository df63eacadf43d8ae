"""No process of a role outlives its guardian's care, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEADLINE_S = 20.0

API_SERVER = """
import os, subprocess, sys, time
place = sys.argv[1]
# Like vLLM's: an engine core that starts a worker, each in a session of its own, both deaf to SIGTERM.
core = (
    "import os, signal, subprocess, sys, time\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    "place = sys.argv[1]\\n"
    "worker = 'import signal, time\\\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\\\ntime.sleep(600)'\\n"
    "w = subprocess.Popen([sys.executable, '-c', worker], start_new_session=True)\\n"
    "open(place + '/pids.tmp', 'w').write(f'{os.getppid()} {os.getpid()} {w.pid}')\\n"
    "os.rename(place + '/pids.tmp', place + '/pids')\\n"
    "time.sleep(600)\\n"
)
subprocess.Popen([sys.executable, "-c", core, place], start_new_session=True)
time.sleep(float(sys.argv[2]))
sys.exit(3)
"""


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Tree:
    """A guardian with a fake API server, engine core and worker below it."""

    def __init__(self, place: Path, lives_s: float = 600.0, grace_s: float = 0.5) -> None:
        graces = ["--grace", str(grace_s), "--orphan-grace", "0.2"]
        guardian = [sys.executable, "-m", "ascend_pd.launch.guardian", *graces, "--lifeline", "--"]
        role = [sys.executable, "-c", API_SERVER, str(place), str(lives_s)]
        self.guardian = subprocess.Popen([*guardian, *role], stdin=subprocess.PIPE)
        assert eventually((place / "pids").exists)
        self.api_server, self.engine_core, self.worker = map(int, (place / "pids").read_text().split())

    @property
    def processes(self) -> tuple[int, int, int]:
        return self.api_server, self.engine_core, self.worker

    def none_left(self) -> bool:
        return eventually(lambda: not any(map(is_alive, self.processes)))

    def close(self) -> None:
        for pid in (self.guardian.pid, *self.processes):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.guardian.wait()
        if self.guardian.stdin:
            self.guardian.stdin.close()


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path)
    assert all(map(is_alive, tree.processes))
    yield tree
    tree.close()


def test_a_killed_api_server_takes_its_engine_core_and_worker_along(tree: Tree) -> None:
    os.kill(tree.api_server, signal.SIGKILL)
    assert tree.guardian.wait(DEADLINE_S) == 128 + signal.SIGKILL
    assert tree.none_left()


def test_a_killed_engine_core_leaves_the_worker_in_the_guardians_care(tree: Tree) -> None:
    os.kill(tree.engine_core, signal.SIGKILL)
    os.kill(tree.api_server, signal.SIGTERM)
    assert tree.guardian.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert tree.none_left()


def test_the_end_of_the_supervisor_ends_the_role(tree: Tree) -> None:
    """What the kernel does to the pipe when the supervisor is killed."""
    assert tree.guardian.stdin
    tree.guardian.stdin.close()
    assert tree.guardian.wait(DEADLINE_S) != 0
    assert tree.none_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_ends_everything(tree: Tree, number: signal.Signals) -> None:
    tree.guardian.send_signal(number)
    assert tree.guardian.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert tree.none_left()


def test_a_killed_guardian_takes_the_roles_first_process_along(tree: Tree) -> None:
    """The rest is adopted by whoever adopts orphans above it: `ascend-pd up` does."""
    tree.guardian.kill()
    assert eventually(lambda: not is_alive(tree.api_server))


def test_the_exit_code_is_the_roles_and_what_it_left_is_ended(tmp_path: Path) -> None:
    tree = Tree(tmp_path, lives_s=0.3)
    assert tree.guardian.wait(DEADLINE_S) == 3
    assert tree.none_left()
    tree.close()


def test_a_command_that_cannot_be_started_is_said_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ascend_pd.launch.guardian", "--", "/nowhere/python"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 127
    assert done.stderr == "guardian: cannot start /nowhere/python: No such file or directory\n"
