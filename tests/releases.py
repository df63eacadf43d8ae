"""Released packages for tests: downloaded once by pip, unpacked into a cache that outlives the run."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CACHE = Path(os.environ.get("ASCEND_PD_TEST_CACHE", Path.home() / ".cache" / "ascend-pd")) / "releases"
DOWNLOAD_TIMEOUT_S = 600
SDIST_NEEDS = ("setuptools-scm<9", "vcs-versioning")
"""What vllm-ascend's setup.py imports before pip believes that it is vllm-ascend; its real build needs more."""
SDIST_ENV = {"COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910b1"}


class DownloadFailed(Exception):
    """pip could not fetch a release; the tests that need it cannot tell anything, so they fail."""


def python_sources(requirement: str) -> Path:
    """A directory that can go on PYTHONPATH: a wheel's Python files and metadata, without its compiled part."""
    return _unpacked(requirement, "sources", everything=False)


def wheel_contents(requirement: str) -> Path:
    """A directory with all of a wheel's files."""
    return _unpacked(requirement, "contents", everything=True)


def sdist_contents(requirement: str) -> Path:
    """A directory with all of a source distribution's files."""
    target = _directory(requirement)
    with _once(target, "sdist") as needed:
        if needed:
            _pip("install", *SDIST_NEEDS, "--target", str(target / "build-needs"))
            path = os.pathsep.join([str(target / "build-needs"), os.environ.get("PYTHONPATH", "")])
            options = ("--no-build-isolation", "--no-binary", ":all:")
            archive = _download(requirement, target, *options, env={**SDIST_ENV, "PYTHONPATH": path})
            with tarfile.open(archive) as tar:
                tar.extractall(target / "unpacked", filter="data")
            (top,) = (target / "unpacked").iterdir()
            top.rename(target / "sdist")
            shutil.rmtree(target / "build-needs")
    return target / "sdist"


def _unpacked(requirement: str, name: str, *, everything: bool) -> Path:
    target = _directory(requirement)
    with _once(target, name) as needed:
        if needed:
            with zipfile.ZipFile(_download(requirement, target)) as archive:
                wanted = [n for n in archive.namelist() if everything or _is_source(n)]
                archive.extractall(target / name, wanted)
    return target / name


def _is_source(name: str) -> bool:
    return name.endswith((".py", ".pyi")) or ".dist-info/" in name


def _directory(requirement: str) -> Path:
    return CACHE / requirement.replace("==", "-")


@contextmanager
def _once(target: Path, name: str) -> Iterator[bool]:
    """Whether `target/name` has to be made; other processes wait. What an interrupted run left is thrown away."""
    target.mkdir(parents=True, exist_ok=True)
    marker = target / f".{name}-complete"
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.exists():
            yield False
            return
        for left_over in (name, "unpacked", "download", "build-needs"):
            shutil.rmtree(target / left_over, ignore_errors=True)
        yield True
        shutil.rmtree(target / "download", ignore_errors=True)
        marker.touch()


def _download(requirement: str, target: Path, *options: str, env: Mapping[str, str] | None = None) -> Path:
    directory = target / "download"
    _pip("download", requirement, "--dest", str(directory), *options, env=env)
    files = [path for path in directory.iterdir() if path.is_file()]
    if len(files) != 1:
        raise DownloadFailed(f"pip download {requirement} left {sorted(p.name for p in files)}")
    return files[0]


def _pip(command: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    line = [
        sys.executable,
        "-m",
        "pip",
        command,
        "--no-deps",
        "--quiet",
        "--disable-pip-version-check",
        *arguments,
    ]
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, env={**os.environ, **(env or {})}
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadFailed(f"{' '.join(line[2:])} took more than {DOWNLOAD_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise DownloadFailed(f"{' '.join(line[2:])} failed:\n{done.stderr.strip()[-2000:]}")
