"""Generated pages and schema are current, and the schema agrees with the reader."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import jsonschema
import pytest
import yaml

from ascend_pd.check.host.rules import HOST_RULES
from ascend_pd.check.rules import RULES

ROOT = Path(__file__).resolve().parents[3]
GALLERY = Path(__file__).parent / "gallery"
SCHEMA = json.loads((ROOT / "deploy/schema/pdcluster.schema.json").read_text(encoding="utf-8"))
REFERENCE: dict[str, str] = runpy.run_path(str(ROOT / "scripts/gen_reference.py"))["reference"]()


@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_a_generated_file_is_current(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == REFERENCE[name], "run scripts/gen_reference.py"


@pytest.mark.parametrize("rule", [*RULES.values(), *HOST_RULES.values()], ids=lambda r: r.name)
def test_every_rule_has_a_page_in_both_languages_that_ends_with_the_fix(rule: object) -> None:
    assert rule.page_en.strip().split("\n\n")[-1].startswith("Fix: ")
    assert rule.page_zh.strip().split("\n\n")[-1].startswith("处理：")


def test_rule_names_are_kebab_case_and_unique() -> None:
    names = [*RULES, *HOST_RULES]
    assert len(names) == len(set(names))
    assert all(name == name.lower() and "_" not in name for name in names)


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/examples").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_schema_accepts_the_examples(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), SCHEMA)


def test_the_schema_refuses_what_the_reader_refuses() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load((GALLERY / "schema.yaml").read_text(encoding="utf-8")), SCHEMA)
