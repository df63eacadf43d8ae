"""The library's timers must be in order; the launcher's values are, the library's defaults are not."""

from __future__ import annotations

import pytest

from ascend_pd.wire.environment import mooncake_environment, mooncake_environment_problems


def test_the_launchers_values_are_in_order() -> None:
    assert mooncake_environment_problems(mooncake_environment("tcp")) == ()


def test_the_librarys_defaults_are_named_as_a_race() -> None:
    problems = mooncake_environment_problems({})
    assert len(problems) == 2
    assert "MC_TCP_STATUS_TIMEOUT_SEC (30 s) must be 5 s below MC_TRANSFER_TIMEOUT (30 s)" in problems[0]
    assert "MC_TCP_PROGRESS_TIMEOUT_SEC" in problems[1]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MC_TRANSFER_TIMEOUT", "6", "must be 5 s below MC_TRANSFER_TIMEOUT (6 s)"),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", "29", "MC_TCP_PROGRESS_TIMEOUT_SEC (29 s)"),
        ("MC_TCP_STATUS_TIMEOUT_SEC", "5s", "'5s' is not a whole number"),
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "512", "at least 1024"),
    ],
)
def test_a_value_that_breaks_the_order_is_named(name: str, value: str, words: str) -> None:
    problems = mooncake_environment_problems({**mooncake_environment("tcp"), name: value})
    assert any(words in problem for problem in problems)
