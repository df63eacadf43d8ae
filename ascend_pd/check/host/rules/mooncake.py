"""Mooncake cannot be imported.

Its module is linked against libibverbs and libnuma even for TCP; the Debian package that has the missing
library is named.

Fix: `apt-get install libibverbs1 libnuma1`, or install the wheel for this hardware.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.host.facts import MOONCAKE_IMPORT, HostFacts
from ascend_pd.check.matrix import DEBIAN_OF_LIBRARY
from ascend_pd.check.subject import Pool, Subject

NAME = "host-mooncake"
SEVERITY = "error"
ZH = """无法导入 Mooncake。

即使只用 TCP，它的模块也链接了 libibverbs 与 libnuma；会指出缺少的库所在的 Debian 包。

处理：`apt-get install libibverbs1 libnuma1`，或安装适合此硬件的 wheel。
"""
WHEELS = {True: "mooncake-transfer-engine-npu", False: "mooncake-transfer-engine-non-cuda"}


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """What the interpreter said."""
    run = facts.command(MOONCAKE_IMPORT)
    if run is None or (run.state == "ran" and not run.code):
        return
    where = f"host:{facts.hostname}"
    last = run.lines[-3:]
    if run.state == "timeout":
        yield error(NAME, where, "importing Mooncake did not end in time", "try it by hand", last)
    elif match := re.search(r"(lib\S+\.so[.\d]*): cannot open shared object", run.output):
        library = match.group(1)
        package = DEBIAN_OF_LIBRARY.get(library)
        fix = f"apt-get install {package}" if package else f"install what has {library}"
        yield error(NAME, where, f"Mooncake needs {library}, which is missing", fix, last)
    elif "ModuleNotFoundError" in run.output:
        yield error(NAME, where, "Mooncake is not installed", f"pip install {WHEELS[pool.is_npu]}", last)
    else:
        yield error(NAME, where, "Mooncake cannot be imported", "try it by hand", last)
