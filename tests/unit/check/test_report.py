from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_pd.cli import main

ROOT = Path(__file__).resolve().parents[3]
MIXED = str(Path(__file__).parent / "gallery" / "mixed-a2-a3.yaml")
WARNING = str(Path(__file__).parent / "gallery" / "network-not-closed.yaml")
GOOD = str(ROOT / "deploy" / "examples" / "cpu-1p1d.yaml")

REPORT = """\
{path}: refused (1 error)
  pool decode (decode, A2)
    error hardware-mixed  line 36, $.spec.pools[1].hardware
      prefill pool 'prefill' is A3 and decode pool 'decode' is A2
      fix: put both on A3 or both on A2
  pool     role     hardware  instances  tp x pp x dp  KV tokens  HTTP  side channel
  prefill  prefill  A3        1          8 x 1 x 1     1541225    8100  36000
  decode   decode   A2        1          4 x 1 x 1     645635     8200  36000
  proxy 0.0.0.0:8000
"""


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["check", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_report_says_where_what_why_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(capsys, MIXED)
    assert (code, out, err) == (1, REPORT.format(path=MIXED), "")


def test_json_has_the_documented_keys_and_nothing_else_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(capsys, MIXED, "--format", "json")
    report = json.loads(out)
    (finding,) = report["findings"]
    assert (code, err, report["ok"]) == (1, "", False)
    assert finding["rule"] == "hardware-mixed"
    assert finding["severity"] == "error"
    assert finding["path"] == "$.spec.pools[1].hardware"
    assert {"message", "fix", "line", "evidence", "file"} <= finding.keys()
    assert report["clusters"][0]["pools"][0]["kv_capacity_tokens"] == 1541225


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([GOOD], 0),
        ([WARNING], 0),
        ([WARNING, "--strict"], 1),
        ([GOOD, MIXED], 1),
        (["/no/such/file.yaml"], 2),
        ([GOOD, MIXED, "/no/such/file.yaml"], 2),
    ],
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_the_exit_code_is_that_of_the_worst_file(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, form: str
) -> None:
    got, out, _ = check(capsys, *arguments, "--format", form)
    assert got == code
    if form == "json":
        assert json.loads(out)["ok"] is (code == 0)


def test_unusable_input_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("kind: Deployment\n")
    code, out, err = check(capsys, str(path))
    assert (code, out) == (2, "")
    assert err.startswith(f"ascend-pd: error: {path}: not a PDCluster: kind is 'Deployment'")
    assert err.count("\n") == 1


def test_schema_errors_of_a_cluster_are_findings_with_lines(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(Path(__file__).parent / "gallery" / "schema.yaml")
    code, out, _ = check(capsys, path, "--format", "json")
    found = json.loads(out)["findings"]
    assert code == 1
    assert [f["line"] for f in found] == sorted(f["line"] for f in found)
    assert {f["rule"] for f in found} == {"spec-invalid"}


@pytest.mark.parametrize("command", [["up"], ["engine", "--pool", "prefill", "--print"]])
def test_a_cluster_that_cannot_work_is_not_started(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main([*command, MIXED]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"ascend-pd: error: {MIXED}: hardware-mixed: $.spec.pools[1].hardware: prefill pool")


def test_the_check_imports_nothing_heavy() -> None:
    code = f"""
import sys
from ascend_pd.cli import main
assert main(["check", {GOOD!r}]) == 0
sys.exit(" ".join({{"torch", "vllm", "numpy", "transformers", "rich", "psutil"}} & sys.modules.keys()) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_gets_the_same_words_in_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, _ = check(capsys, MIXED)
    assert code == 1
    assert "\x1b[" in out
    assert re.sub(r"\x1b\[[0-9;]*m", "", out) == REPORT.format(path=MIXED)
