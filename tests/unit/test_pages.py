"""Pages exist in both languages, their links lead somewhere, and what they show of the program is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ascend_pd import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("connectors/**/*.md"),
        *ROOT.glob("requirements/*.md"),
    ]
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_page_exists_in_english_and_chinese() -> None:
    english = {path.name for path in (ROOT / "docs" / "en").glob("*.md")}
    chinese = {path.name for path in (ROOT / "docs" / "zh").glob("*.md")}
    assert english == chinese and english
    assert (ROOT / "README.zh-CN.md").is_file()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "docs/en/quickstart.md", "docs/zh/quickstart.md",
                                  "docs/en/operations.md", "docs/zh/operations.md"])  # fmt: skip
def test_commands_and_files_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = set(re.findall(r"ascend-pd ([a-z]+)\b", text))
    known = {*cli.COMMANDS, *cli.FORWARDED, "manifests"}
    assert commands and commands <= known
    files = set(re.findall(r"(?:\./)?((?:deploy|scripts|requirements)/[\w./-]+)", text))
    assert files and not [file for file in files if not (ROOT / file.rstrip("/.")).exists()]


def test_both_readmes_start_with_the_two_commands() -> None:
    for readme in ("README.md", "README.zh-CN.md"):
        top = (ROOT / readme).read_text(encoding="utf-8").split("\n## ")[0]
        assert "./scripts/demo.sh" in top and "./scripts/test.sh" in top


@pytest.mark.parametrize("image", sorted((ROOT / "deploy" / "containers").glob("*.Dockerfile")), ids=name)
def test_a_container_file_copies_what_is_there(image: Path) -> None:
    copied = re.findall(r"^COPY (.+) \S+$", image.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert {"ascend_pd", "connectors", "metaserver", "proxy", "pyproject.toml", "README.md"} <= set(sources)
    assert not [source for source in sources if not (ROOT / source).exists()]
