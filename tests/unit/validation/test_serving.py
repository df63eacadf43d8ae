"""The equality and benchmark parts against two small services that speak just enough of the API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scripts.validation.parts import Site, benchmark, equality
from scripts.validation.report import Part

CPU = Path(__file__).resolve().parents[3] / "deploy/examples/cpu-1p1d.yaml"
Model = Callable[[list[int]], list[int]]


def same(prompt: list[int]) -> list[int]:
    return [sum(prompt) % 1000 + i for i in range(12)]


def wrong_after_a_block(prompt: list[int]) -> list[int]:
    tokens = same(prompt)
    return tokens[:3] + [0] * 9 if len(prompt) > 128 else tokens


class Service:
    """`/v1/completions` of a model that is a function."""

    def __init__(self, model: Model, first_event: bytes = b'data: {"choices": [{"text": "a"}]}\n\n') -> None:
        self.asked: list[dict[str, Any]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                service.asked.append(body)
                self.send_response(200)
                self.end_headers()
                if body.get("stream"):
                    self.wfile.write(first_event + b"data: [DONE]\n\n")
                else:
                    self.wfile.write(json.dumps({"choices": [{"token_ids": model(body["prompt"])}]}).encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, name="service")
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    running: list[Service] = []

    def start(*args: Any) -> Service:
        running.append(Service(*args))
        return running[-1]

    yield start
    for service in running:
        service.close()


def site(pd: Service, alone: Service) -> Site:
    return Site(spec=CPU, device="cpu", pd_url=pd.url, collocated_url=alone.url)


def test_equal_services_pass_and_are_asked_the_same_greedy_questions(serve: Callable[..., Service]) -> None:
    pd, alone = serve(same), serve(same)
    part = Part("equality")
    equality(part, site(pd, alone))
    assert part.passed and len(part.checks) == 6
    assert pd.asked == alone.asked
    assert all(body["temperature"] == 0 and body["model"] == "smollm2" for body in pd.asked)


def test_a_service_that_goes_wrong_after_a_block_fails_for_those_prompts_alone(
    serve: Callable[..., Service],
) -> None:
    part = Part("equality")
    equality(part, site(serve(wrong_after_a_block), serve(same)))
    assert [(check.name, check.passed) for check in part.checks] == [
        ("1 prompt tokens", True),
        ("127 prompt tokens", True),
        ("128 prompt tokens", True),
        ("129 prompt tokens", False),
        ("513 prompt tokens", False),
        ("1500 prompt tokens", False),
    ]
    assert {check.figures["equal"] for check in part.checks if not check.passed} == {3}


def test_both_parts_ask_once(serve: Callable[..., Service]) -> None:
    pd, alone = serve(same), serve(same)
    both = site(pd, alone)
    equality(Part("equality"), both)
    asked = len(pd.asked)
    part = Part("benchmark")
    benchmark(part, both)
    assert part.passed and len(pd.asked) == asked
    assert [check.name for check in part.checks] == [f"first token after {n} prompt tokens" for n in (128, 1024)]
    assert all(check.figures["ratio"] > 0 for check in part.checks)


@pytest.mark.parametrize(
    ("event", "message"),
    [(b'data: {"error": {"message": "no cache"}}\n\n', "no cache"), (b"", "without an event")],
)
def test_a_stream_without_a_token_is_no_measurement(
    serve: Callable[..., Service], event: bytes, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        benchmark(Part("benchmark"), site(serve(same, event), serve(same)))


def test_what_could_not_be_asked_once_is_not_started_again(serve: Callable[..., Service]) -> None:
    both = site(serve(same, b""), serve(same))
    with pytest.raises(RuntimeError, match="without an event"):
        equality(Part("equality"), both)
    with pytest.raises(RuntimeError, match="part before it failed"):
        benchmark(Part("benchmark"), both)
