"""Make `.venv` ready: locked packages, this project (editable), and the Debian libraries that Mooncake loads.

Run by `scripts/demo.sh` and `scripts/test.sh` with the system's Python, so it uses the standard library alone.
What is already there is left as it is: a second run takes a moment.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SYSTEM_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1"}
"""Shared library → Debian package. Mooncake's module links to both, also when it only speaks TCP."""
SUPPORTED = (3, 11)
HEARTBEAT_S = 10.0


class SetupError(Exception):
    """One line for the operator."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def run(command: list[str], what: str) -> bool:
    """Run a command with its output in the log, saying every few seconds how far it is; True when it succeeded."""
    started = time.monotonic()
    with LOG.open("a", encoding="utf-8") as log:
        print(f"\n$ {' '.join(command)}", file=log, flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    return process.wait(timeout=HEARTBEAT_S) == 0
                except subprocess.TimeoutExpired:
                    say(f"{what}: {time.monotonic() - started:.0f} s, {progress_of_pip()}")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def log_tail(lines: int) -> list[str]:
    text = LOG.read_text(encoding="utf-8", errors="replace") if LOG.exists() else ""
    return [line.strip() for line in text.splitlines() if line.strip()][-lines:]


def progress_of_pip() -> str:
    """What pip is at; while it unpacks it says nothing, so then the packages in place are counted."""
    lines = [line for line in log_tail(200) if not line.startswith("WARNING")]
    if any(line.startswith("Installing collected packages") for line in lines[-20:]):
        return f"{len(list(VENV.glob('lib/python*/site-packages/*.dist-info')))} packages in place"
    return lines[-1][:100] if lines else "starting"


def check_python() -> None:
    if sys.version_info[:2] != SUPPORTED:
        raise SetupError(
            f"Python {sys.version_info[0]}.{sys.version_info[1]} runs this, but the locked packages are for "
            "Python 3.11 - install python3.11, or name it: PYTHON=/path/to/python3.11"
        )


def make_venv() -> None:
    """Create `.venv`, or leave a working one alone; one that came from elsewhere or broke is made anew."""
    place = VENV / ".place"
    works = (
        PYTHON.exists()
        and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    )
    moved = place.exists() and place.read_text(encoding="utf-8") != str(ROOT)
    if works and not moved:
        return
    say(f"creating {VENV}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", VENV], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        reason = (made.stdout + made.stderr).strip().splitlines() or ["no reason given"]
        raise SetupError(
            f"cannot create a virtual environment: {reason[-1]} - on Debian: apt-get install python3.11-venv"
        )
    place.write_text(str(ROOT), encoding="utf-8")


class Stamp:
    """Remembers in `.venv` that a step was done with exactly these inputs."""

    def __init__(self, name: str, *inputs: Path) -> None:
        self._file = VENV / f".{name}.stamp"
        digest = hashlib.sha256()
        for path in inputs:
            digest.update(path.read_bytes())
        self._digest = digest.hexdigest()

    @property
    def is_fresh(self) -> bool:
        return self._file.exists() and self._file.read_text(encoding="utf-8") == self._digest

    def set(self) -> None:
        self._file.write_text(self._digest, encoding="utf-8")


def pip_install(arguments: list[str], what: str) -> bool:
    # --no-compile: only a small part of what is installed is ever imported, and that is compiled then.
    options = ["--no-deps", "--no-compile", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    return run([str(PYTHON), "-m", "pip", "install", *options, *arguments], what)


def pip_failed(what: str) -> SetupError:
    errors = [line for line in log_tail(40) if line.startswith("ERROR")] or log_tail(1)
    return SetupError(f"{what} failed: {errors[0] if errors else 'no output'} - the whole output is in {LOG}")


def pinned(lock: Path, package: str) -> str | None:
    """The pin `package==version` of a lock file."""
    lines = (line.strip() for line in lock.read_text(encoding="utf-8").splitlines())
    return next((line for line in lines if line.startswith(f"{package}==")), None)


def install_torch(pin: str) -> None:
    """PyTorch's CPU build, from the configured index when it is there, else from PyTorch's own."""
    say(f"installing {pin}")
    if pip_install([pin], pin):
        return
    if not any("No matching distribution" in line or "from versions" in line for line in log_tail(20)):
        raise pip_failed(f"installing {pin}")
    say(f"the package index has no {pin}: taking it from {TORCH_INDEX}")
    if not pip_install(["--extra-index-url", TORCH_INDEX, pin], pin):
        raise pip_failed(f"installing {pin}")


def install_lock(name: str) -> None:
    lock = ROOT / "requirements" / f"{name}.lock"
    stamp = Stamp(name, lock)
    if stamp.is_fresh:
        return
    torch = pinned(lock, "torch")
    if torch is not None:
        install_torch(torch)
    count = sum(1 for line in lock.read_text(encoding="utf-8").splitlines() if line.strip() and line[0] != "#")
    what = f"installing {count} packages of requirements/{name}.lock"
    say(what)
    if not pip_install(["-r", str(lock)], what):
        raise pip_failed(what)
    stamp.set()


def install_project() -> None:
    stamp = Stamp("project", ROOT / "pyproject.toml")
    if stamp.is_fresh:
        return
    say("installing ascend-pd (editable)")
    if not pip_install(["--no-build-isolation", "--editable", str(ROOT)], "installing ascend-pd"):
        raise pip_failed("installing ascend-pd")
    stamp.set()


def missing_libraries() -> list[str]:
    """The Debian packages of the shared libraries that cannot be loaded."""
    missing = []
    for library, package in SYSTEM_LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def may_run_as_root(root: list[str]) -> bool:
    if not root:
        return True
    if shutil.which(root[0]) is None:
        return False
    return subprocess.run([*root, "true"], capture_output=True, check=False).returncode == 0


def install_libraries() -> None:
    packages = missing_libraries()
    if not packages:
        return
    remedy = f"apt-get install {' '.join(packages)} (or your system's equivalent), then run this again"
    apt = shutil.which("apt-get")
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if apt is None or not may_run_as_root(root):
        raise SetupError(f"system libraries are missing and may not be installed from here - {remedy}")
    install = [*root, apt, "install", "-y", "--no-install-recommends", *packages]
    say(f"installing {' '.join(packages)} with apt-get")
    if not run(install, "apt-get install"):
        run([*root, apt, "update"], "apt-get update")
        if not run(install, "apt-get install") or missing_libraries():
            raise SetupError(f"apt-get could not install {' '.join(packages)} - see {LOG}, then: {remedy}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--test", action="store_true", help="also what the tests need")
    args = parser.parse_args()
    try:
        check_python()
        make_venv()
        for name in ("cpu", "build", *(("test",) if args.test else ())):
            install_lock(name)
        install_project()
        install_libraries()
    except SetupError as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
