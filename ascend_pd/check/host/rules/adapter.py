"""The connectors cannot be loaded with the vLLM of this image.

The adapter is chosen by vLLM's version (see `host-versions`) and then really imported, on NPU hosts together with
the device driver's torch_npu: a patched or half-installed vLLM shows here, not in a worker at start.

Fix: use an image with a released vLLM that the connectors have an adapter for.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, unknown
from ascend_pd.check.host.facts import ADAPTER_IMPORT, DEVICE_IMPORT, HostFacts
from ascend_pd.check.subject import Pool, Subject
from ascend_pd.errors import OperatorError
from ascend_pd.versions import ADAPTERS, vllm_adapter

NAME = "host-adapter"
SEVERITY = "error"
ZH = """本镜像中的 vLLM 无法加载连接器。

适配模块按 vLLM 版本选择（见 `host-versions`），然后真正导入；NPU 主机上还会连同设备驱动用到的 torch_npu 一起导入。
被改动过或安装不完整的 vLLM 会在这里暴露，而不是等到 worker 启动时。

处理：使用装有正式发布、且连接器有适配的 vLLM 的镜像。
"""
WHAT = {ADAPTER_IMPORT: "the adapter for vLLM", DEVICE_IMPORT: "the NPU device driver"}


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """What was imported, and whether it is what the version says."""
    where = f"host:{facts.hostname}"
    version = facts.packages.get("vllm")
    if not version:
        return
    try:
        expected = vllm_adapter({"vllm": version})
    except OperatorError:
        return  # host-versions has said it
    for name, what in WHAT.items():
        run = facts.command(name)
        if run is None:
            continue
        if run.state != "ran":
            yield unknown(
                NAME, where, f"importing {what} did not end in time", "try it by hand: " + name, run.lines[-3:]
            )
        elif run.code:
            fix = f"use an image with one of vLLM {', '.join(ADAPTERS)} as released"
            yield error(NAME, where, f"{what} cannot be imported with vLLM {version}", fix, run.lines[-3:])
        elif name == ADAPTER_IMPORT and run.lines[-1:] != (expected,):
            said = run.lines[-1] if run.lines else "nothing"
            yield error(
                NAME, where, f"vLLM {version} needs {expected}, the connectors chose {said}", "reinstall ascend-pd"
            )
