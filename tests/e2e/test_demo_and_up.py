"""Real engines leave no process behind: not when `up` is killed, not when an API server is, not after a demo."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from ascend_pd.launch.guardian import descendants
from tests.e2e.cluster import READY_S, cpu_spec

ROOT = Path(__file__).resolve().parents[2]
GONE_S = 60.0


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and not condition():
        time.sleep(0.25)
    return condition()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@contextmanager
def running(*arguments: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ascend_pd", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def spec_file(place: Path) -> Path:
    path = place / "cluster.yaml"
    path.write_text(yaml.safe_dump(cpu_spec("pull", connector={"protocol": "tcp"})), encoding="utf-8")
    return path


def test_up_killed_hard_takes_its_engines_along(tmp_path: Path) -> None:
    output = tmp_path / "up.out"
    with running("up", str(spec_file(tmp_path)), "--log-dir", str(tmp_path / "logs"), output=output) as up:
        assert eventually(lambda: up.poll() is not None or "all ready" in output.read_text(), READY_S)
        assert up.poll() is None, output.read_text()
        tree = descendants(up.pid)
        names = " ".join(map(command_line, tree))
        assert names.count("VLLM::EngineCore") == 2 and "-m proxy" in names, names
        up.kill()
        up.wait()
        assert eventually(lambda: not any(map(is_alive, tree)), GONE_S), [command_line(pid) for pid in tree]


def test_a_killed_api_server_takes_its_engine_core_along(tmp_path: Path) -> None:
    output = tmp_path / "engine.out"
    with running("engine", str(spec_file(tmp_path)), "--pool", "prefill", output=output) as engine:
        assert eventually(
            lambda: any("VLLM::Worker" in command_line(pid) for pid in descendants(engine.pid)), READY_S
        ), output.read_text()
        tree = descendants(engine.pid)
        [api_server] = [pid for pid in tree if "api_server" in command_line(pid)]
        os.kill(api_server, signal.SIGKILL)
        assert engine.wait(GONE_S) == 128 + signal.SIGKILL
        assert not any(map(is_alive, tree))


@pytest.mark.parametrize("mode", ["pull", "layerwise"])
def test_the_demo_does_the_main_job_and_leaves_nothing(mode: str, tmp_path: Path) -> None:
    output = tmp_path / "demo.out"
    with running("demo", "--mode", mode, "--log-dir", str(tmp_path / "logs"), output=output) as demo:
        seen: set[int] = set()

        def ended() -> bool:
            seen.update(descendants(demo.pid))
            return demo.poll() is not None

        assert eventually(ended, READY_S), output.read_text()
        text = output.read_text()
        assert demo.returncode == 0, text
        verdict = rf'demo: ok mode={mode} answer="[^"]*Paris[^"]*" kv_bytes=[1-9]\d* transfer_ms=\d+\.\d'
        assert re.fullmatch(verdict, text.splitlines()[-1])
        assert seen and not any(map(is_alive, seen))
