"""The validation kit's own logic: what counts as passed, what the report says, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ascend_pd.check.finding import has_errors
from ascend_pd.check.judge import judge, subject_of
from ascend_pd.spec.parse import parse_spec
from scripts.validation import __main__ as kit
from scripts.validation import serving
from scripts.validation.parts import PARTS, Site
from scripts.validation.report import Part, render, run_part

ROOT = Path(__file__).resolve().parents[3]
CPU, NPU = ROOT / "deploy/examples/cpu-1p1d.yaml", ROOT / "deploy/examples/a3-qwen3-32b.yaml"


def silent(_: str) -> None: ...


def passing(part: Part, site: Site) -> None:
    with part.check("one"):
        pass


def failing(part: Part, site: Site) -> None:
    passing(part, site)
    with part.check("two"):
        raise ValueError("wrong bytes")


def breaking(part: Part, site: Site) -> None:
    raise RuntimeError("no such device")


def empty(part: Part, site: Site) -> None: ...


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    table: dict[str, Any] = {"preflight": passing, "transport": failing, "equality": breaking, "benchmark": empty}
    for name, run in table.items():
        monkeypatch.setitem(PARTS, name, run)
    monkeypatch.delitem(PARTS, "contract")
    return table


def report_of(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "report.json"
    code = kit.main([str(CPU), "--device", "cpu", "--report", str(path), *options])
    return code, json.loads(path.read_text(encoding="utf-8"))


def test_every_part_runs_and_is_reported_whatever_the_others_do(tmp_path: Path, parts: dict[str, Any]) -> None:
    code, report = report_of(tmp_path)
    assert code == 1
    assert [(p["name"], p["passed"]) for p in report["parts"]] == [
        ("preflight", True),
        ("transport", False),
        ("equality", False),
        ("benchmark", False),
    ]
    assert not report["passed"]
    assert (report["name"], report["device"]) == ("cpu-1p1d", "cpu")


def test_a_report_of_passed_parts_has_passed(tmp_path: Path, parts: dict[str, Any]) -> None:
    code, report = report_of(tmp_path, "--only", "preflight")
    assert (code, report["passed"], len(report["parts"])) == (0, True, 1)


def test_a_failed_check_carries_its_reason(parts: dict[str, Any]) -> None:
    part = run_part("transport", lambda found: failing(found, None), silent)  # type: ignore[arg-type]
    assert [(c.name, c.passed, c.detail) for c in part.checks] == [
        ("one", True, ""),
        ("two", False, "ValueError: wrong bytes"),
    ]


def test_a_part_that_breaks_has_failed_and_says_why(parts: dict[str, Any]) -> None:
    part = run_part("equality", lambda found: breaking(found, None), silent)  # type: ignore[arg-type]
    assert not part.passed
    assert part.checks[0].detail == "RuntimeError: no such device"


def test_a_part_that_checked_nothing_has_not_passed(parts: dict[str, Any]) -> None:
    part = run_part("benchmark", lambda found: empty(found, None), silent)  # type: ignore[arg-type]
    assert not part.passed
    assert part.checks[0].detail == "it checked nothing"


def test_a_run_without_parts_has_not_passed() -> None:
    assert json.loads(render("x", "npu", [], {}))["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(NPU), "--device", "cpu"], "is for A3, not for --device cpu"),
        ([str(CPU)], "is for cpu, not for --device npu"),
        ([str(ROOT / "pyproject.toml")], "pyproject.toml"),
        ([str(CPU), "--device", "cpu", "--only", "preflight,speed"], "no part speed"),
        ([str(CPU), "--device", "cpu", "--dies", "0"], "--dies 0"),
    ],
)
def test_what_cannot_be_run_is_refused_without_a_report(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    assert kit.main([*arguments, "--report", str(report)]) == 2
    assert message in capsys.readouterr().err
    assert not report.exists()


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/examples").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_example_gives_a_collocated_cluster_to_compare_with(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    union = parse_spec(yaml.safe_dump(serving.union_document(document))).cluster
    (pool,) = union.spec.pools
    decode = next(p for p in parse_spec(path.read_text(encoding="utf-8")).cluster.spec.pools if p.role == "decode")
    assert (pool.role, pool.replicas, pool.parallel.tp) == ("union", 1, decode.parallel.tp)
    assert document["spec"]["pools"][0]["role"] == "prefill"
    assert not has_errors(judge(subject_of(union)))


def test_text_that_differs_fails_at_its_prompt_and_says_where() -> None:
    pair = serving.Answers(tokens={1: [5, 6, 7], 128: [5, 9, 7]})
    alone = serving.Answers(tokens={1: [5, 6, 7], 128: [5, 6, 7]})
    part = Part("equality")
    serving.compare_text(part, pair, alone)
    assert [(c.passed, c.figures["equal"]) for c in part.checks] == [(True, 3), (False, 1)]


def test_times_are_recorded_as_a_ratio_of_the_same_run() -> None:
    part = Part("benchmark")
    serving.compare_times(
        part, serving.Answers(first_token_ms={128: 30.0}), serving.Answers(first_token_ms={128: 20.0})
    )
    assert part.checks[0].figures == {"pd_ms": 30.0, "one_engine_ms": 20.0, "ratio": 1.5}


def test_prompts_leave_room_for_the_answer() -> None:
    document = yaml.safe_load(CPU.read_text(encoding="utf-8"))
    longest = serving.max_prompt(document)
    assert longest + serving.MAX_TOKENS < document["spec"]["model"]["maxModelLen"]
    assert {len(serving.prompt(n, 0)) for n in serving.LENGTHS} == set(serving.LENGTHS)
