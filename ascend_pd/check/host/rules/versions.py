"""What is installed is not what the file states, or not a combination that goes together.

Driver and firmware from their version.info, CANN from its install info, Python packages from their metadata.
Compared with `engine.versions`, with the table of releases, and with what the connectors have an adapter for.

Fix: install the stated version, or correct the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, unknown
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.host.tools import smi_version
from ascend_pd.check.matrix import SUPPORTED_VLLM, base_version, release
from ascend_pd.check.subject import Pool, Subject
from ascend_pd.versions import ADAPTERS, series_of

NAME = "host-versions"
SEVERITY = "error"
ZH = """安装的版本与文件所写不符，或不是可以配套的组合。

驱动与固件取自 version.info,CANN 取自安装信息，Python 包取自元数据；与 `engine.versions`、发布对照表以及连接器
有适配的版本比较。

处理：安装所写版本，或修正文件。
"""


def installed(pool: Pool, facts: HostFacts) -> dict[str, str]:
    """Component → version, as far as it could be read."""
    found = {name: version for name, version in facts.packages.items() if version}
    if not pool.is_npu:
        return found
    for name in ("driver", "firmware"):
        found[name] = _value(facts.files.get(f"/usr/local/Ascend/{name}/version.info"))
    if smi := facts.command("npu-smi info"):
        found["driver"] = found["driver"] or smi_version(smi.output)
    found["cann"] = next(
        (v for path, text in facts.files.items() if path.endswith("install.info") and (v := _value(text))), ""
    )
    return {name: version for name, version in found.items() if version}


def image(pool: Pool, facts: HostFacts) -> dict[str, str]:
    """What this image has: component → version, and under `adapter` the connectors' module for its vLLM."""
    have = installed(pool, facts)
    if vllm := have.get("vllm"):
        have["adapter"] = ADAPTERS.get(series_of(vllm), "none")
    return have


def _value(text: str | None) -> str:
    for line in (text or "").splitlines():
        key, _, value = line.partition("=")
        if key.strip().lower() == "version":
            return value.strip()
    return ""


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """Stated against installed, then installed against the table."""
    where = f"host:{facts.hostname}"
    have = installed(pool, facts)
    stated = subject.spec.engine.versions
    for name in ("vllm", "vllm-ascend", "cann", "torch-npu", "mooncake", "driver", "firmware"):
        wanted = getattr(stated, name.replace("-", "_"))
        if wanted and name not in have:
            yield unknown(
                NAME, where, f"{name} {wanted} is stated and no {name} was found", "run this in the image"
            )
        elif wanted and have[name].partition("+")[0].lower() != wanted.lower().removeprefix("v"):
            message = f"{name} {have[name]} is installed, the file says {wanted}"
            yield error(NAME, where, message, f"install {name} {wanted}, or correct the file")
    vllm = have.get("vllm")
    if vllm and not any(base_version(vllm).startswith(f"{minor}.") for minor in SUPPORTED_VLLM):
        fix = f"install one of {', '.join(f'{v}.x' for v in SUPPORTED_VLLM)}"
        yield error(NAME, where, f"the connectors have no adapter for vLLM {vllm}", fix)
    row = release(have["vllm-ascend"]) if "vllm-ascend" in have else None
    for name, wanted in (("vllm", row.vllm), ("torch-npu", row.torch_npu), ("cann", row.cann)) if row else ():
        if name in have and base_version(have[name]) != base_version(wanted):
            message = f"vllm-ascend {have['vllm-ascend']} goes with {name} {wanted}, {have[name]} is installed"
            yield error(NAME, where, message, f"install {name} {wanted}")
