"""While a request queues on D, its scheduler side keeps P's hold alive, and lets go of it when it is not wanted."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator

import pytest

from ascend_pd.wire.params import to_dict
from connectors.pull.scheduler import PullScheduler
from tests.engine.kv_fixture import FINGERPRINT, engine_request, settings
from tests.engine.pull_source import Source, StartSource
from tests.engine.test_pull_workers import prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]
LEASE_S = 2.0


@pytest.fixture
def decode() -> Iterator[PullScheduler]:
    opened = PullScheduler(settings("decode", lease_seconds=LEASE_S), FINGERPRINT)
    yield opened
    opened.close()


@pytest.fixture
def source(start_source: StartSource) -> Source:
    return start_source([("t", prompt_of(40), [1, 2])], config={"lease_seconds": LEASE_S})


def test_a_queued_request_keeps_the_hold_past_its_lease_until_it_is_aborted(
    decode: PullScheduler, source: Source
) -> None:
    request = engine_request("r", prompt_of(40), to_dict(source.handoffs[0]))
    decode.on_new_request(request)
    ended, _, _ = select.select([source.process.stdout], [], [], 3 * LEASE_S)
    assert not ended, "the hold ended while its request was queued"
    aborted = time.monotonic()
    decode.ended(request, ([],))
    assert source.released() == "t"
    assert time.monotonic() - aborted < LEASE_S, "the hold ended by its lease, not by the release"


def test_a_hold_that_nobody_renews_ends_with_its_lease(source: Source) -> None:
    assert source.released() == "t"
