"""The command table: cheap to load, honest exit codes, one line for what the operator can put right."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

from ascend_pd import cli
from ascend_pd.errors import OperatorError


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_of_the_table_is_a_command_module(name: str) -> None:
    module = import_module(cli.COMMANDS[name][0])
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    assert callable(module.run)


@pytest.mark.parametrize("name", sorted(cli.FORWARDED))
def test_every_forwarded_command_forwards(name: str) -> None:
    assert callable(import_module(cli.FORWARDED[name][0]).forward)


def test_a_forwarded_command_gets_its_arguments_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[str]] = []
    module = SimpleNamespace(forward=lambda arguments: got.append(arguments) or 5)
    monkeypatch.setitem(sys.modules, "a_command_for_tests", module)  # type: ignore[arg-type]
    monkeypatch.setitem(cli.FORWARDED, "pass", ("a_command_for_tests", "pass it on"))
    assert cli.main(["pass", "--prefill", "http://p:1", "--help"]) == 5
    assert got == [["--prefill", "http://p:1", "--help"]]


def test_the_help_page_imports_no_command_module() -> None:
    program = (
        "import sys\nfrom ascend_pd import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "loaded = [m for m, _ in cli.COMMANDS.values() if m in sys.modules]\n"
        "assert not loaded and 'torch' not in sys.modules and 'vllm' not in sys.modules, loaded"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def _with_command(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    module = SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "a_command_for_tests", module)  # type: ignore[arg-type]
    monkeypatch.setitem(cli.COMMANDS, "try", ("a_command_for_tests", "try it"))


def test_an_operator_error_is_one_line_and_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise OperatorError("port 8000 is in use", "stop what listens there")

    _with_command(monkeypatch, run)
    assert cli.main(["try"]) == 1
    assert capsys.readouterr().err == "ascend-pd: error: port 8000 is in use - stop what listens there\n"


def test_the_exit_code_is_what_the_command_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_command(monkeypatch, lambda args: 2)
    assert cli.main(["try"]) == 2


def test_ctrl_c_ends_with_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    _with_command(monkeypatch, run)
    assert cli.main(["try"]) == 130
    assert capsys.readouterr().err == "ascend-pd: interrupted\n"


@pytest.mark.parametrize("arguments", [[], ["chekc"], ["--nonsense"]])
def test_wrong_usage_is_exit_code_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: ascend-pd" in capsys.readouterr().err
