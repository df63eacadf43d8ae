"""Setting up a fresh machine: what is installed from where, and what is said when it cannot be done."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("cpu", "build", "test")


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path)
    monkeypatch.setattr(module, "LOG", tmp_path / "setup.log")
    (tmp_path / "requirements").mkdir()
    return module


def fake_pip(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, fails_with: str, unless: str) -> list[list[str]]:
    """pip that fails with a line of output unless an argument is among its arguments; returns its calls."""
    calls: list[list[str]] = []

    def run(arguments: list[str], what: str) -> bool:
        calls.append(arguments)
        if unless in arguments:
            return True
        setup.LOG.write_text(fails_with)
        return False

    monkeypatch.setattr(setup, "pip_install", run)
    return calls


def test_pytorchs_own_index_is_asked_only_when_the_pinned_build_is_not_found(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(setup, monkeypatch, "", unless="torch==2.13.0+cpu")
    setup.install_torch("torch==2.13.0+cpu")
    assert calls == [["torch==2.13.0+cpu"]]

    calls = fake_pip(
        setup,
        monkeypatch,
        "ERROR: No matching distribution found for torch==2.13.0+cpu",
        unless="--extra-index-url",
    )
    setup.install_torch("torch==2.13.0+cpu")
    assert calls[1] == ["--extra-index-url", setup.TORCH_INDEX, "torch==2.13.0+cpu"]


def test_another_failure_of_pip_is_not_taken_for_a_missing_build(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(setup, monkeypatch, "ERROR: No space left on device", unless="never")
    with pytest.raises(setup.SetupError, match="No space left on device"):
        setup.install_torch("torch==2.13.0+cpu")
    assert len(calls) == 1


def test_a_lock_is_installed_once_and_again_when_it_changes(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = setup.ROOT / "requirements" / "build.lock"
    lock.write_text("hatchling==1\n")
    calls = fake_pip(setup, monkeypatch, "", unless="-r")
    setup.install_lock("build")
    setup.install_lock("build")
    assert len(calls) == 1
    lock.write_text("hatchling==2\n")
    setup.install_lock("build")
    assert len(calls) == 2


def test_a_failed_install_is_tried_again_next_time(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (setup.ROOT / "requirements" / "build.lock").write_text("hatchling==1\n")
    calls = fake_pip(setup, monkeypatch, "ERROR: the index is down", unless="never")
    for _ in range(2):
        with pytest.raises(setup.SetupError, match="the index is down"):
            setup.install_lock("build")
    assert len(calls) == 2


def test_a_missing_library_that_may_not_be_installed_is_one_line_with_the_remedy(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "SYSTEM_LIBRARIES", {"libnot-there.so.9": "libnotthere9"})
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    with pytest.raises(setup.SetupError, match="apt-get install libnotthere9") as caught:
        setup.install_libraries()
    assert "\n" not in str(caught.value)


def test_another_python_is_refused_with_the_way_to_name_the_right_one(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(setup.SetupError, match=r"PYTHON=/path/to/python3\.11"):
        setup.check_python()


def test_a_long_step_says_how_far_it_is(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "HEARTBEAT_S", 0.05)
    assert setup.run(
        [sys.executable, "-c", "import time; print('Collecting x', flush=True); time.sleep(0.5)"], "pip"
    )
    assert "setup: pip: 0 s, Collecting x" in capsys.readouterr().out


def _name(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower().replace("_", "-").replace(".", "-")


def _project() -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def test_the_base_install_pulls_neither_torch_nor_vllm() -> None:
    """Walks what the installed distributions themselves ask for, without their extras."""
    todo = [_name(r) for r in _project()["dependencies"]]  # type: ignore[attr-defined]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform
        todo += [_name(r) for r in requires if "extra ==" not in r]
    assert "numpy" in seen and "starlette" in seen, "the walk does not walk"
    assert not {name for name in seen if name.startswith(("torch", "vllm", "transformers", "nvidia", "mooncake"))}


def test_the_locks_hold_everything_the_project_asks_for() -> None:
    locked = {
        _name(line)
        for lock in LOCKS
        for line in (ROOT / "requirements" / f"{lock}.lock").read_text(encoding="utf-8").splitlines()
    }
    project = _project()
    extras: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    asked = [*project["dependencies"], *extras["cpu"], *extras["test"], *extras["dev"]]  # type: ignore[misc]
    assert not {_name(r) for r in asked} - locked
