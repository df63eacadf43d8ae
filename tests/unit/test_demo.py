"""The demo's verdict: only an answer that came over a moved cache counts."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ascend_pd.embedded import conversation, demo
from ascend_pd.embedded.conversation import Answer, DemoFailed, Measured, ask, measured
from ascend_pd.embedded.demo_cluster import DemoPorts, demo_cluster_text
from ascend_pd.errors import OperatorError
from ascend_pd.launch.front_command import cluster_plan
from ascend_pd.launch.plan import Site
from ascend_pd.spec.cluster import Mode
from ascend_pd.spec.parse import parse_spec
from ascend_pd.spec.topology import derive_topology

ANSWER = Answer("The capital of France is Paris.", 37, "t-1", 812.0, 990.0)
FIGURES = Measured(kv_bytes=5898240, prefill_ms=410.0, transfer_ms=6.25)
PORTS = DemoPorts(prefill=18000, decode=18001, proxy=18002, metaserver=18003, kv=18004)


class FakeProxy(BaseHTTPRequestHandler):
    """Streams an answer, or fails, and tells records."""

    records: list[dict[str, Any]]
    pieces: list[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if not self.pieces:
            self._send(500, "application/json", b'{"error": {"message": "decode: connection refused"}}')
            return
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": p}}]} for p in self.pieces]
        chunks.append({"choices": [], "usage": {"prompt_tokens": 37, "completion_tokens": 2, "total_tokens": 39}})
        events = [
            {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "smollm2", **c} for c in chunks
        ]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._send(200, "text/event-stream", body.encode())

    def do_GET(self) -> None:
        wanted = parse_qs(urlsplit(self.path).query)["transfer_id"][0]
        records = [record for record in self.records if record["transfer_id"] == wanted]
        self._send(200, "application/json", json.dumps({"records": records}).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("x-ascend-pd-transfer-id", "t-1")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[HTTPServer]:
    FakeProxy.records = []
    FakeProxy.pieces = []
    server = HTTPServer(("127.0.0.1", 0), FakeProxy)
    thread = threading.Thread(target=server.serve_forever, name="fake proxy")
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def record(kv_bytes: int) -> dict[str, Any]:
    return {"transfer_id": "t-1", "kv_bytes": kv_bytes,
            "phases_ms": {"p_queue": 1.0, "prefill": 2.0, "transfer": 3.0 if kv_bytes else 0.0}}  # fmt: skip


def test_the_answer_is_streamed_and_measured(proxy: HTTPServer) -> None:
    pytest.importorskip("openai")
    FakeProxy.pieces = ["The capital", " is Paris."]
    shown: list[str] = []
    answer = ask(f"http://127.0.0.1:{proxy.server_port}/v1", "smollm2", "?", shown.append)
    assert (answer.text, answer.prompt_tokens, answer.transfer_id) == ("The capital is Paris.", 37, "t-1")
    assert [piece for piece in shown if piece] == ["The capital", " is Paris."]


def test_a_sites_http_proxy_is_not_asked_for_loopback(proxy: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    FakeProxy.pieces = ["Paris"]
    assert ask(f"http://127.0.0.1:{proxy.server_port}/v1", "smollm2", "?", lambda _: None).text == "Paris"


def test_an_error_of_the_cluster_is_the_reason(proxy: HTTPServer) -> None:
    pytest.importorskip("openai")
    with pytest.raises(DemoFailed, match="decode: connection refused"):
        ask(f"http://127.0.0.1:{proxy.server_port}/v1", "smollm2", "?", lambda _: None)


def test_figures_come_from_the_record_of_this_transfer(proxy: HTTPServer) -> None:
    FakeProxy.records = [{**record(1), "transfer_id": "another"}, record(4096)]
    assert measured("127.0.0.1", proxy.server_port, "t-1") == Measured(4096, 3.0, 3.0)


def test_a_push_that_ended_before_its_prefill_is_a_moved_cache(proxy: HTTPServer) -> None:
    hidden = record(4096)
    hidden["phases_ms"]["transfer"] = 0.0
    FakeProxy.records = [hidden]
    assert measured("127.0.0.1", proxy.server_port, "t-1") == Measured(4096, 3.0, 0.0)


@pytest.mark.parametrize(
    ("records", "says"), [([], "no record of transfer 't-1'"), ([record(0)], "no KV cache was moved")]
)
def test_an_answer_without_a_moved_cache_is_a_failure(
    proxy: HTTPServer, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]], says: str
) -> None:
    monkeypatch.setattr(conversation, "RECORD_S", 0.3)
    FakeProxy.records = records
    with pytest.raises(DemoFailed, match=says):
        measured("127.0.0.1", proxy.server_port, "t-1")


def test_the_last_line_is_for_scripts() -> None:
    line = demo.last_line(Mode.PULL, ANSWER, FIGURES)
    assert line == ('demo: ok mode=pull answer="The capital of France is Paris." kv_bytes=5898240 transfer_ms=6.2')
    assert re.fullmatch(r'demo: ok mode=\w+ answer=".*" kv_bytes=\d+ transfer_ms=[\d.]+', line)


def test_nonsense_for_an_answer_is_a_failure() -> None:
    with pytest.raises(DemoFailed, match="does not name Paris: 'blub'"):
        demo.last_line(Mode.PULL, Answer("blub", 1, "t", 1.0, 1.0), FIGURES)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_demos_cluster_file_is_a_sound_one(mode: Mode) -> None:
    cluster = parse_spec(demo_cluster_text(mode, PORTS)).cluster
    topology = derive_topology(cluster)
    plans = cluster_plan(cluster, topology, Site(), Path("cluster.yaml"))
    assert [plan.kind.value for plan in plans if plan.kind.value != "engine"] == (
        ["metaserver", "proxy"] if mode is Mode.LAYERWISE else ["proxy"]
    )
    ports = [listener.address.port for listener in topology.listeners]
    assert len(set(ports)) == len(ports) and set(ports) <= set(range(18000, 18006))


def test_free_ports_skips_what_is_taken() -> None:
    rng, taken = random.Random(1), set(range(18000, 30990))
    with pytest.raises(OperatorError, match="no free ports"):
        demo.free_ports(rng, lambda port: False)
    ports = demo.free_ports(rng, lambda port: port in taken)
    assert ports.kv + 1 in taken and ports.prefill in taken
