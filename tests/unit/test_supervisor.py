"""Roles come up together, are watched together, and go together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_pd.errors import OperatorError
from ascend_pd.launch.guardian import descendants
from ascend_pd.launch.plan import Kind
from ascend_pd.launch.role_process import Grace
from ascend_pd.launch.supervisor import RoleEnded, Supervisor
from tests.fakes.role import pids_in, role_plan

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and not condition():
        time.sleep(0.02)
    return condition()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


QUICK = Grace(role_s=0.3, orphan_s=0.2)


def test_all_are_ready_the_proxy_last_and_all_are_gone_afterwards(tmp_path: Path) -> None:
    told: list[str] = []
    plans = [
        role_plan("prefill/0", "--child"),
        role_plan("decode/0", "--child"),
        role_plan("proxy", kind=Kind.PROXY),
    ]
    with Supervisor(plans, tmp_path, told.append, QUICK) as supervisor:
        supervisor.start(DEADLINE_S)
        pids = pids_in(tmp_path / "prefill-0.log") + pids_in(tmp_path / "decode-0.log")
        assert len(pids) == 4 and all(map(is_alive, pids))
        supervisor.check()
    assert not any(map(is_alive, pids))
    assert [line.split(":")[0] for line in told if "ready after" in line][-1] == "proxy"
    assert told.index(next(line for line in told if line.startswith("proxy: starting"))) == 4
    assert told[-1] == "stopping proxy, decode/0, prefill/0"


def test_one_that_dies_is_named_with_the_end_of_its_log_and_the_rest_is_stopped(tmp_path: Path) -> None:
    told: list[str] = []
    dying = ("--say", "no such model", "--exit-after", "0.2", "--code", "7", "--ready-after", "600")
    plans = [role_plan("prefill/0", "--child"), role_plan("decode/0", *dying)]
    supervisor = Supervisor(plans, tmp_path, told.append, QUICK)
    with pytest.raises(RoleEnded, match=r"decode/0 ended with exit code 7 after \d+ s"), supervisor:
        supervisor.start(DEADLINE_S)
    assert "decode/0: the end of its log:" in told and "    no such model" in told
    assert not any(map(is_alive, pids_in(tmp_path / "prefill-0.log")))


def test_one_that_never_answers_is_named(tmp_path: Path) -> None:
    plans = [role_plan("prefill/0"), role_plan("decode/0", "--ready-after", "600")]
    supervisor = Supervisor(plans, tmp_path, lambda _: None, QUICK)
    with pytest.raises(OperatorError, match="decode/0 did not answer in time"), supervisor:
        supervisor.start(1.5)


def test_a_killed_role_is_noticed_while_watching(tmp_path: Path) -> None:
    supervisor = Supervisor([role_plan("prefill/0", "--child")], tmp_path, lambda _: None, QUICK)
    with supervisor:
        supervisor.start(DEADLINE_S)
        child, parent = pids_in(tmp_path / "prefill-0.log")
        os.kill(parent, signal.SIGKILL)
        with pytest.raises(RoleEnded, match="prefill/0 was killed by SIGKILL"):
            supervisor.watch()
        assert not is_alive(child)


SUPERVISING = """
import sys
from pathlib import Path
from ascend_pd.launch.role_process import Grace
from ascend_pd.launch.session import supervising
from ascend_pd.launch.supervisor import Supervisor
from tests.fakes.role import role_plan
plans = [role_plan("a/0", "--child"), role_plan("b/0", "--child")]
with supervising():
    with Supervisor(plans, Path(sys.argv[1]), print, Grace(0.3, 0.2)) as s:
        s.start(30)
        print("up", flush=True)
        s.watch()
"""


class Up:
    """A process that supervises two roles, as `ascend-pd up` does."""

    def __init__(self, logs: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISING, str(logs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            text=True,
        )
        assert self.process.stdout
        for line in self.process.stdout:
            if line == "up\n":
                break
        self.roles = pids_in(logs / "a-0.log") + pids_in(logs / "b-0.log")
        assert len(self.roles) == 4 and all(map(is_alive, self.roles))

    def guardians(self) -> list[int]:
        return [pid for pid in descendants(self.process.pid) if pid not in self.roles]

    def nothing_left(self) -> bool:
        return eventually(lambda: not any(map(is_alive, self.roles)))


@pytest.fixture
def up(tmp_path: Path) -> Up:
    return Up(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_stop_it_leaves_nothing(up: Up, number: signal.Signals) -> None:
    up.process.send_signal(number)
    up.process.wait(DEADLINE_S)
    assert not any(map(is_alive, up.roles))


def test_killed_hard_it_still_leaves_nothing(up: Up) -> None:
    up.process.kill()
    up.process.wait()
    assert up.nothing_left()


def test_a_killed_guardian_is_noticed_and_its_role_ended(up: Up) -> None:
    os.kill(up.guardians()[0], signal.SIGKILL)
    assert up.process.wait(DEADLINE_S) == 1
    assert not any(map(is_alive, up.roles))
