"""`ascend-pd up`: what the proxy is started with is what the engines were started with."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ascend_pd.cli import main, up
from ascend_pd.launch.plan import Kind, ProcessPlan
from tests.unit.spec.test_parse import GOOD

load = import_module("proxy.load")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[tuple[ProcessPlan, ...]], None]]:
    """Functions that stand in for what happens while a cluster starts and runs."""
    events: list[Callable[[tuple[ProcessPlan, ...]], None]] = []

    class Supervised:
        def __init__(self, plans: tuple[ProcessPlan, ...], *_: Any) -> None:
            self.plans = plans

        def __enter__(self) -> Supervised:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def start(self, _: float) -> None:
            for event in events:
                event(self.plans)

        def watch(self) -> None:
            pass

    @contextlib.contextmanager
    def nothing() -> Iterator[None]:
        yield

    monkeypatch.setattr(up, "Supervisor", Supervised)
    monkeypatch.setattr(up, "supervising", nothing)
    for name in ("require_embedded_model", "require_runnable", "require_startable", "require_local"):
        monkeypatch.setattr(up, name, lambda *_: None)
    return events


def run_up(spec: Path) -> int:
    return up.run(argparse.Namespace(spec=str(spec), log_dir=spec.parent / "logs", ready_timeout=1.0))


def proxy_of(plans: tuple[ProcessPlan, ...]) -> list[str]:
    [proxy] = [plan for plan in plans if plan.kind is Kind.PROXY]
    return list(proxy.argv[3:])


@pytest.mark.parametrize("edit", ["port: 8300", None])
def test_a_file_that_is_edited_while_engines_start_changes_the_proxy_only_when_it_reloads(
    started: list[Callable[[tuple[ProcessPlan, ...]], None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    edit: str | None,
) -> None:
    spec = tmp_path / "cluster.yaml"
    spec.write_text(GOOD, encoding="utf-8-sig")
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []

    def edited(plans: tuple[ProcessPlan, ...]) -> None:
        if edit is None:
            spec.unlink()
        else:
            spec.write_text(GOOD.replace("port: 8200", edit))
        monkeypatch.chdir("/")
        seen.append(load.load_settings(proxy_of(plans)))
        if edit is not None:
            seen.append(load.reader_of(proxy_of(plans))())
        copy = Path(proxy_of(plans)[1])
        assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700
        seen.append(copy)

    started.append(edited)
    assert run_up(Path("cluster.yaml")) == 0
    at_start, *again, copy = seen
    assert [i.url.rpartition(":")[2] for i in at_start.decode] == ["8200"]
    assert [[i.url.rpartition(":")[2] for i in one.decode] for one in again] == ([["8300"]] if edit else [])
    assert not copy.exists()


@pytest.mark.parametrize("redirected", ["/dev/fd/{}", "/proc/self/fd/{}"])
@pytest.mark.parametrize("is_pipe", [True, False])
def test_what_only_this_process_can_read_is_refused_in_one_line(
    started: list[Callable[[tuple[ProcessPlan, ...]], None]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    redirected: str,
    is_pipe: bool,
) -> None:
    started.append(lambda _: pytest.fail("started"))
    spec = tmp_path / "cluster.yaml"
    spec.write_text(GOOD)
    if is_pipe:
        read, write = os.pipe()
        os.write(write, GOOD.encode())
        os.close(write)
    else:
        read = os.open(spec, os.O_RDONLY)
    try:
        assert main(["up", redirected.format(read)]) == 1
    finally:
        os.close(read)
    error = capsys.readouterr().err
    assert "write it to a file" in error
    assert error.count("\n") == 1


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["up", str(tmp_path / "pipe")]) == 1
    assert "a pipe" in capsys.readouterr().err
