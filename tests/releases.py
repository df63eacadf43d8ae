"""Released packages for tests: downloaded once by pip, unpacked into a cache that outlives the run."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE = Path(os.environ.get("ASCEND_PD_TEST_CACHE", Path.home() / ".cache" / "ascend-pd")) / "releases"
DOWNLOAD_TIMEOUT_S = 600


class DownloadFailed(Exception):
    """pip could not fetch a release; the tests that need it cannot tell anything, so they fail."""


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def download(requirement: str, directory: Path, *options: str) -> Path:
    """The file that pip fetches for `name==version`, without dependencies."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory)]
    try:
        done = subprocess.run(
            [*command, *options, requirement], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadFailed(f"pip download {requirement} took more than {DOWNLOAD_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise DownloadFailed(f"pip download {requirement} failed:\n{done.stderr.strip()[-2000:]}")
    files = [p for p in directory.iterdir() if p.suffix in {".whl", ".gz", ".zip"}]
    if len(files) != 1:
        raise DownloadFailed(f"pip download {requirement} left {sorted(p.name for p in files)} in {directory}")
    return files[0]


def python_sources(requirement: str) -> Path:
    """A directory that can go on PYTHONPATH: a wheel's Python files and metadata, without its compiled part."""
    target = CACHE / requirement.replace("==", "-")
    with _locked(target):
        marker = target / ".complete"
        if not marker.exists():
            wheel = download(requirement, target / "wheel")
            with zipfile.ZipFile(wheel) as archive:
                wanted = [n for n in archive.namelist() if n.endswith((".py", ".pyi")) or ".dist-info/" in n]
                archive.extractall(target / "sources", wanted)
            shutil.rmtree(target / "wheel")
            marker.touch()
    return target / "sources"
