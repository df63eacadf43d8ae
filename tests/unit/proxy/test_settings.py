"""What the proxy is told on its command line."""

from __future__ import annotations

import pytest

from ascend_pd.errors import OperatorError
from proxy.load import load_settings

ENGINES = ["--prefill", "http://p:1", "--decode", "http://d:2"]


def test_any_field_can_be_set_on_the_command_line() -> None:
    settings = load_settings(
        [*ENGINES, "--set", "timeouts.prefill_s=7.5", "--set", "retries=5", "--set", "policy.fallback=none"]
    )
    assert (settings.timeouts.prefill_s, settings.retries, settings.policy.fallback) == (7.5, 5, "none")
    assert settings.timeouts.connect_s == 3.0, "the section's other fields keep their defaults"


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("retries", "no assignment"),
        ("timeouts.prefil_s=1", "prefil_s"),
        ("retries=many", "retries"),
        ("host.name=x", "host has no fields"),
    ],
)
def test_a_wrong_assignment_is_named(assignment: str, says: str) -> None:
    with pytest.raises(OperatorError, match=says):
        load_settings([*ENGINES, "--host", "127.0.0.1", "--set", assignment])
