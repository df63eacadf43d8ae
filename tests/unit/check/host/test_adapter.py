"""Whether the connectors load in this image, and what the report says that it has."""

from __future__ import annotations

import pytest

from ascend_pd.check.finding import Severity
from ascend_pd.check.host.facts import ADAPTER_IMPORT, DEVICE_IMPORT, CommandFacts, HostFacts
from ascend_pd.check.host.rules import HOST_RULES
from ascend_pd.check.host.rules.versions import image
from ascend_pd.check.judge import subject_of
from ascend_pd.check.subject import Subject
from ascend_pd.spec.parse import parse_spec
from tests.unit.check.clusters import good
from tests.unit.spec.texts import text_of

LOADED = CommandFacts("ran", output="INFO some log line\nvllm_0_23\n")
BROKEN = CommandFacts("ran", 1, "Traceback\nImportError: cannot import name 'SupportsHMA'\n")
STUCK = CommandFacts("timeout")


@pytest.fixture
def subject() -> Subject:
    return subject_of(parse_spec(text_of(good())).cluster)


def findings(subject: Subject, vllm: str | None, **runs: CommandFacts) -> list[tuple[Severity, str]]:
    names = {"adapter": ADAPTER_IMPORT, "device": DEVICE_IMPORT}
    facts = HostFacts(
        hostname="n1", pool="prefill", commands={names[k]: run for k, run in runs.items()}, packages={"vllm": vllm}
    )
    return [(f.severity, f.message) for f in HOST_RULES["host-adapter"].check(subject, subject.pools[0], facts)]


def test_an_image_whose_connectors_load_is_good(subject: Subject) -> None:
    assert findings(subject, "0.23.0+empty", adapter=LOADED, device=CommandFacts("ran")) == []


def test_an_image_without_vllm_is_none_of_our_business(subject: Subject) -> None:
    assert findings(subject, None) == []


def test_a_vllm_that_the_adapter_cannot_use_is_refused(subject: Subject) -> None:
    found = findings(subject, "0.23.0", adapter=BROKEN)
    assert found == [(Severity.ERROR, "the adapter for vLLM cannot be imported with vLLM 0.23.0")]


def test_a_torch_npu_that_does_not_load_is_refused(subject: Subject) -> None:
    found = findings(subject, "0.23.0", adapter=LOADED, device=BROKEN)
    assert found == [(Severity.ERROR, "the NPU device driver cannot be imported with vLLM 0.23.0")]


def test_an_import_that_does_not_end_is_no_pass(subject: Subject) -> None:
    assert [severity for severity, _ in findings(subject, "0.23.0", adapter=STUCK)] == [Severity.UNKNOWN]


def test_another_adapter_than_the_version_asks_for_is_refused(subject: Subject) -> None:
    found = findings(subject, "0.32.0", adapter=LOADED)
    assert found == [(Severity.ERROR, "vLLM 0.32.0 needs vllm_0_32, the connectors chose vllm_0_23")]


def test_an_unknown_vllm_is_left_to_the_versions_rule(subject: Subject) -> None:
    assert findings(subject, "0.99.0", adapter=BROKEN) == []


@pytest.mark.parametrize(
    ("vllm", "adapter"), [("0.23.0+empty", "vllm_0_23"), ("0.32.0", "vllm_0_32"), ("0.99.0", "none")]
)
def test_the_report_says_which_adapter_serves_the_image(subject: Subject, vllm: str, adapter: str) -> None:
    facts = HostFacts(
        hostname="n1", pool="prefill", packages={"vllm": vllm, "torch-npu": "2.10.0.post4", "x": None}
    )
    assert image(subject.pools[0], facts) == {"vllm": vllm, "torch-npu": "2.10.0.post4", "adapter": adapter}
