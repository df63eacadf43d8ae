"""What the OpenAPI document promises holds for generated requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.unit.proxy.conftest import Stack, open_stack

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def live() -> Iterator[Stack]:
    """A proxy with its fakes in a thread of its own."""
    ready: list[Stack] = []
    started, stop = threading.Event(), threading.Event()

    async def run() -> None:
        async with open_stack(union=1) as stack:
            ready.append(stack)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="live-proxy")
    thread.start()
    assert started.wait(20)
    yield ready[0]
    stop.set()
    thread.join(20)


@pytest.fixture(scope="module")
def api(live: Stack) -> schemathesis.schemas.BaseSchema:
    return schemathesis.openapi.from_url(live.url + "/openapi.json")


OPERATIONS = [
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
]


def test_every_endpoint_is_documented(api: schemathesis.schemas.BaseSchema) -> None:
    assert {(o.ok().method.upper(), o.ok().path) for o in api.get_all_operations()} == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_as_documented(api: schemathesis.schemas.BaseSchema, method: str, path: str) -> None:
    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy())
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    check()
