"""Whatever is in the file, the answer is a cluster or a SpecError with a place and a message."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ascend_pd.spec.parse import parse_spec
from ascend_pd.spec.problems import SpecError, location_of, path_of
from tests.unit.spec.test_parse import GOOD

SNIPPETS = [
    "&a ",
    "*a",
    "!!x ",
    "<<: ",
    "[",
    "{",
    "- ",
    "\n---\n",
    "\n...\n",
    ": ",
    "'",
    '"',
    "\t",
    "\x00",
    "|\n",
    "? ",
    "%YAML 1.2\n",
]


def answers(text: str) -> None:
    try:
        parse_spec(text)
    except SpecError as error:
        assert error.problems
        assert all(p.message and p.path.startswith("$") for p in error.problems)


@given(st.text(max_size=200))
@example("\ufeffkind: PDCluster")
@example("\ud800")
@settings(deadline=None)
def test_any_text_is_answered(text: str) -> None:
    answers(text)


@given(st.integers(0, len(GOOD)), st.integers(0, 12), st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=8)))
@settings(deadline=None, max_examples=400)
def test_any_damage_to_a_good_file_is_answered(at: int, removed: int, inserted: str) -> None:
    answers(GOOD[:at] + inserted + GOOD[at + removed :])


@given(
    st.lists(st.one_of(st.integers(0, 99), st.from_regex(r"[A-Za-z][A-Za-z_-]{0,9}", fullmatch=True)), max_size=5)
)
def test_a_path_reads_back_as_the_location_it_was_made_of(location: list[str | int]) -> None:
    assert list(location_of(path_of(location))) == location
