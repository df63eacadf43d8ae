"""The processes that the fork server makes are as good as started ones, and none outlives the tests."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.fork_server import ForkServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]
ROOT = Path(__file__).resolve().parents[2]
HERE = "tests.engine.test_fork_server"
WAIT_S = 60.0
OWNER = f"""
import json, time
from tests.engine.fork_server import ForkServer
server = ForkServer("{HERE}")
child = server.start("{HERE}:echo", env={{}})
print(json.dumps([server._process.pid, child.pid]), flush=True)
time.sleep({WAIT_S})
"""
seen: list[str] = []


def report(*arguments: str) -> None:
    """A child: says what it finds around it, and leaves something behind in its module."""
    seen.extend(arguments)
    print(json.dumps({"seen": seen, "environment": dict(os.environ), "pid": os.getpid()}))


def echo() -> None:
    """A child: until its standard input closes."""
    for line in sys.stdin:
        print(line, end="", flush=True)


def fail() -> None:
    sys.exit(3)


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer(HERE) as opened:
        yield opened


def watch(pid: int) -> int:
    """A descriptor that becomes readable when this process ends."""
    return os.pidfd_open(pid)


def all_end(watched: list[int]) -> bool:
    ended = [bool(select.select([descriptor], [], [], WAIT_S)[0]) for descriptor in watched]
    for descriptor in watched:
        os.close(descriptor)
    return all(ended)


def test_each_process_has_its_own_arguments_environment_and_state(server: ForkServer) -> None:
    found = []
    for name in ("a", "b"):
        child = server.start(f"{HERE}:report", name, env={"PLAN": name})
        found.append(json.loads(child.stdout.read()))
        assert child.wait(WAIT_S) == 0
        assert found[-1]["pid"] == child.pid
    assert [x["seen"] for x in found] == [["a"], ["b"]]
    assert [x["environment"] for x in found] == [{"PLAN": "a"}, {"PLAN": "b"}]


def test_two_live_side_by_side_and_one_is_stopped_and_killed(server: ForkServer) -> None:
    first, second = (server.start(f"{HERE}:echo", env={}) for _ in range(2))
    first.send_signal(signal.SIGSTOP)
    for child in (first, second):
        child.stdin.write("hello\n")
        child.stdin.flush()
    assert second.stdout.readline() == "hello\n"
    assert not select.select([first.stdout], [], [], 0.2)[0], "a stopped process answered"
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.1)
    first.send_signal(signal.SIGCONT)
    assert first.stdout.readline() == "hello\n"
    first.kill()
    assert first.wait(WAIT_S) == -signal.SIGKILL
    second.stdin.close()
    assert second.wait(WAIT_S) == 0


def test_a_process_that_fails_says_so(server: ForkServer) -> None:
    assert server.start(f"{HERE}:fail", env={}).wait(WAIT_S) == 3


def test_a_server_with_threads_does_not_fork() -> None:
    with (
        ForkServer("mooncake.engine") as threaded,
        pytest.raises(RuntimeError, match=r"the fork server has [0-9]+ threads"),
    ):
        threaded.start(f"{HERE}:echo", env={})


def test_closing_ends_what_still_runs(server: ForkServer) -> None:
    child = server.start(f"{HERE}:echo", env={})
    child.send_signal(signal.SIGSTOP)
    watched = watch(child.pid)
    server.close()
    assert all_end([watched])


@pytest.mark.parametrize("killed", ["owner", "server"])
def test_nothing_outlives_the_owner_or_the_server_killed_hard(killed: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        server_pid, child_pid = json.loads(owner.stdout.readline())
        watched = [watch(pid) for pid in (server_pid, child_pid)]
        os.kill(child_pid, signal.SIGSTOP)
        os.kill(owner.pid if killed == "owner" else server_pid, signal.SIGKILL)
        assert all_end(watched)
    finally:
        owner.kill()
        owner.communicate()
