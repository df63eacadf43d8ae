"""What holds for every engine test."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.fork_server import ForkServer

if TYPE_CHECKING:
    from tests.engine.pull_source import Source, StartSource


@pytest.fixture(autouse=True)
def no_endpoint_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A transport left open dies whenever the garbage is collected, which stops all of Python's threads for a
    second per endpoint: another test's timers then run out."""
    from connectors.transport.endpoint import Endpoint

    opened: weakref.WeakSet[Endpoint] = weakref.WeakSet()
    begin = Endpoint.__init__

    def recorded(self: Endpoint, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        opened.add(self)

    monkeypatch.setattr(Endpoint, "__init__", recorded)
    yield
    left = [endpoint.session for endpoint in opened if endpoint.engine is not None]
    assert not left, f"endpoints left open: {left}"


@pytest.fixture(scope="package")
def fork_server() -> Iterator[ForkServer]:
    """What makes processes that need vLLM, without a wait for its imports each."""
    with ForkServer("tests.engine.pull_source") as server:
        yield server


@pytest.fixture
def start_source(fork_server: ForkServer) -> Iterator[StartSource]:
    """Starts prefill engines, each a fresh process, and ends those that the test did not end."""
    from tests.engine.pull_source import Source

    started: list[Source] = []

    def start(*arguments: Any, **order: Any) -> Source:
        started.append(Source(fork_server, *arguments, **order))
        return started[-1]

    yield start
    for source in started:
        source.close()
