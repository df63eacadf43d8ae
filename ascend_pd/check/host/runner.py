"""Running a tool with a time limit. hccn_tool runs serially, and again when it says that it is busy."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ascend_pd.check.host.facts import CommandFacts
from ascend_pd.check.host.tools import is_busy

LIMIT_S = 10.0
BUSY_TRIES, BUSY_PAUSE_S = 4, 0.5
MAX_OUTPUT = 65536
FALLBACKS = {"hccn_tool": "/usr/local/Ascend/driver/tools/hccn_tool", "npu-smi": "/usr/local/bin/npu-smi"}
"""Where a container usually has them when they are not on the PATH."""


def find_tool(name: str, search_path: str | None = None) -> str | None:
    """The executable, on the PATH or at its usual place."""
    if found := shutil.which(name, path=search_path):
        return found
    fallback = FALLBACKS.get(name)
    return fallback if search_path is None and fallback and Path(fallback).exists() else None


def run_tool(argv: Sequence[str], search_path: str | None = None, limit_s: float = LIMIT_S) -> CommandFacts:
    """One run; never raises."""
    executable = find_tool(argv[0], search_path)
    if executable is None:
        return CommandFacts("missing")
    result = _once([executable, *argv[1:]], limit_s)
    for _ in range(BUSY_TRIES - 1):
        if not is_busy(result.output):
            break
        time.sleep(BUSY_PAUSE_S)
        result = _once([executable, *argv[1:]], limit_s)
    return result


def _once(argv: list[str], limit_s: float) -> CommandFacts:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return CommandFacts("timeout", output=_text(error.stdout or b""))
    except OSError as error:
        return CommandFacts("ran", 127, error.strerror or "cannot be run")
    return CommandFacts("ran", done.returncode, _text(done.stdout))


def _text(raw: bytes) -> str:
    return raw[:MAX_OUTPUT].decode("utf-8", errors="replace")
