"""Every broken file in the gallery is refused for the reason that it states; every rule has at least one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_pd.check.finding import Finding
from ascend_pd.check.judge import judge, subject_of
from ascend_pd.check.outcome import Outcome, outcome_of_error, outcome_of_findings
from ascend_pd.check.rules import RULES
from ascend_pd.spec.load import load_parsed
from ascend_pd.spec.problems import SpecError
from tests.unit.check.clusters import findings, good

ROOT = Path(__file__).resolve().parents[3]
GALLERY = sorted((Path(__file__).parent / "gallery").glob("*.yaml"))
EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.yaml"))
BYSTANDERS = {"past-the-last-port": {"memory-short"}, "mixed-on-one-host": {"devices-short"}}
"""Rules that a file cannot help to break, too."""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken files name model directories from here."""
    monkeypatch.chdir(ROOT)


def outcome(path: Path) -> Outcome:
    try:
        parsed = load_parsed(path)
    except SpecError as error:
        return outcome_of_error(str(path), error)
    subject = subject_of(parsed.cluster)
    return outcome_of_findings(str(path), judge(subject), subject, parsed.document)


def expectation(path: Path) -> tuple[str, str, str]:
    """Rule, severity and a part of the message, from the file's first two lines."""
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    rule, severity = first.removeprefix("# expect: ").split()
    return rule, severity, second.removeprefix("# says: ")


@pytest.mark.parametrize("path", GALLERY, ids=lambda p: p.stem)
def test_a_broken_file_is_refused_for_what_is_broken(path: Path) -> None:
    rule, severity, says = expectation(path)
    found = outcome(path).findings
    hits = [f for f in found if f.rule == rule and f.severity.value == severity and says in f.message]
    assert hits, [f"{f.rule}: {f.message}" for f in found]
    assert all(f.fix for f in hits)
    assert all(f.path.startswith("$.") and f.line for f in hits)


@pytest.mark.parametrize("path", GALLERY, ids=lambda p: p.stem)
def test_a_broken_file_is_not_blamed_for_what_is_whole(path: Path) -> None:
    rule, severity, _ = expectation(path)
    bystanders = (
        {"memory-short", "devices-short"} if path.stem in ("past-the-last-port", "mixed-on-one-host") else set()
    )
    errors = {f.rule for f in outcome(path).findings if f.severity.value == "error"}
    assert errors <= {rule} | bystanders
    assert severity == "error" or not errors


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_has_a_broken_file(rule: str) -> None:
    assert any(expectation(path)[0] == rule for path in GALLERY)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_passes_without_a_word(path: Path) -> None:
    assert outcome(path).findings == ()


@pytest.mark.parametrize("hardware", ["A2", "A3"])
def test_the_good_cluster_passes_without_a_word(hardware: str) -> None:
    assert findings(good(hardware)) == []


def test_an_a2_a3_mix_names_both_pools() -> None:
    (found,) = outcome(Path(__file__).parent / "gallery" / "mixed-a2-a3.yaml").findings
    assert isinstance(found, Finding)
    assert "'prefill' is A3" in found.message
    assert "'decode' is A2" in found.message
