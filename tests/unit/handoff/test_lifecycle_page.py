"""The page about the life cycle shows the machines as they are."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from connectors.handoff.sink_table import SinkState
from connectors.handoff.source_table import SourceState

ROOT = Path(__file__).resolve().parents[3]
DRAW = runpy.run_path(str(ROOT / "scripts/draw_lifecycle.py"))
PAGES = ("docs/en/lifecycle.md", "docs/zh/lifecycle.md")


@pytest.mark.parametrize("name", PAGES)
def test_the_drawn_machines_are_current(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert DRAW["drawn"](page) == page, "run scripts/draw_lifecycle.py"


@pytest.mark.parametrize("name", PAGES)
def test_every_state_is_explained(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    states = {*SourceState, *SinkState} - {"unknown"}
    assert not [state for state in states if f"*{state}*" not in page]


def test_a_diagram_shows_what_a_cell_says() -> None:
    source = DRAW["diagram"](DRAW["MACHINES"]["source"])
    assert "preparing --> held: hold, finished" in source
    assert "released --> [*]" in source
