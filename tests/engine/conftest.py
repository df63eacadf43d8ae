"""What holds for every engine test."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest


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
