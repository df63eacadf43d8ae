"""The metaserver's HTTP interface over loopback."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette

from ascend_pd.wire.http_signature import HttpSigner
from ascend_pd.wire.params import to_dict
from metaserver.settings import Settings
from tests.unit.metaserver_fixture import HOST, NONCE, SECRET, Served, metaserver, reservation

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with metaserver(max_body_bytes=10_000) as served:
        yield served


@pytest.fixture(scope="module")
def secured() -> Iterator[Served]:
    with metaserver(secret=SECRET) as served:
        yield served


def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


class Waiting(threading.Thread):
    """A long poll on its own thread."""

    def __init__(self, server: Served, target: str) -> None:
        super().__init__()
        self.server, self.target, self.result = server, target, None
        self.start()

    def run(self) -> None:
        self.result = self.server.call("GET", self.target)

    def answer(self) -> tuple[int, Any]:
        self.join(20)
        assert self.result is not None
        return self.result


def test_a_reservation_is_accepted_at_once_and_found(server) -> None:
    assert server.post(reservation("found")) == (202, {"transfer_id": "found", "outcome": "accepted"})
    status, found = server.call("GET", "/v1/reservations/found")
    assert status == 200
    assert 0 < found.pop("deadline_seconds") <= 30
    expected = to_dict(reservation("found"))
    del expected["deadline_seconds"]
    assert found == expected


def test_posting_the_same_again_is_accepted_and_another_body_is_a_conflict(server) -> None:
    server.post(reservation("twice"))
    assert server.post(reservation("twice", deadline_seconds=29)) == (
        202,
        {"transfer_id": "twice", "outcome": "known"},
    )
    status, answer = server.post(reservation("twice", sink_port=1))
    assert status == 409
    assert answer["error"]["param"] == "transfer_id"


def test_who_waits_learns_of_a_reservation_as_soon_as_it_is_posted(server) -> None:
    waiting = [Waiting(server, "/v1/reservations/awaited?wait_s=30") for _ in range(3)]
    eventually(lambda: server.metaserver.rendezvous.num_waits == 3)
    server.post(reservation("awaited"))
    assert [w.answer()[0] for w in waiting] == [200] * 3
    assert server.metaserver.rendezvous.num_waits == 0


def test_a_wait_that_runs_out_is_a_404(server) -> None:
    status, answer = server.call("GET", "/v1/reservations/never?wait_s=0.05")
    assert (status, answer["error"]["param"]) == (404, "transfer_id")
    assert server.metaserver.rendezvous.num_waits == 0
    assert not server.metaserver.rendezvous._waiters


def test_who_waits_learns_of_a_release_and_why(server) -> None:
    waiting = Waiting(server, "/v1/reservations/cancelled?wait_s=30")
    eventually(lambda: server.metaserver.rendezvous.num_waits == 1)
    assert server.call("DELETE", "/v1/reservations/cancelled?reason=client%20gone") == (200, {"released": True})
    status, answer = waiting.answer()
    assert status == 410
    assert "client gone" in answer["error"]["message"]
    assert server.post(reservation("cancelled"))[0] == 410


def test_a_deadline_ends_a_reservation(server) -> None:
    server.post(reservation("short", deadline_seconds=0.05))
    eventually(lambda: server.call("GET", "/v1/reservations/short")[0] == 410)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"transfer_id": "a/b"}, "transfer_id"),
        ({"transfer_id": ""}, "transfer_id"),
        ({"sink_port": 0}, "sink_port"),
        ({"sink_port": "36000"}, "sink_port"),
        ({"block_ids": [[1, -1]]}, "block_ids"),
        ({"block_ids": []}, "block_ids"),
        ({"num_cached_tokens": 41}, "num_cached_tokens"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"wire_version": 2}, "wire_version"),
        ({"request_id": "cmpl-1"}, "request_id"),
        ({"block_size": None}, "block_size"),
    ],
)
def test_nonsense_is_a_422_that_names_the_field(server, change, field) -> None:
    body = msgspec.json.encode(to_dict(reservation()) | change)
    status, answer = server.call("POST", "/v1/metaserver", body)
    assert (status, answer["error"]["param"]) == (422, field)
    assert field in answer["error"]["message"]


@pytest.mark.parametrize("field", ["transfer_id", "block_ids", "prompt_hash"])
def test_a_missing_field_is_named(server, field) -> None:
    plain = to_dict(reservation())
    del plain[field]
    status, answer = server.call("POST", "/v1/metaserver", msgspec.json.encode(plain))
    assert (status, answer["error"]["param"]) == (422, field)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"transfer_id": "\xff"}', b"[" * 5000])
def test_what_is_not_a_reservation_at_all_is_a_422(server, body) -> None:
    assert server.call("POST", "/v1/metaserver", body)[0] == 422


@pytest.mark.parametrize("wait_s", ["x", "-1", "nan", "inf", "61"])
def test_a_bad_wait_is_a_422_that_names_it(server, wait_s) -> None:
    status, answer = server.call("GET", f"/v1/reservations/t?wait_s={wait_s}")
    assert (status, answer["error"]["param"]) == (422, "wait_s")


def test_a_bad_transfer_id_in_the_path_is_a_422(server) -> None:
    for method in ("GET", "DELETE"):
        assert server.call(method, "/v1/reservations/a%20b")[0] == 422


def test_a_long_body_is_a_413_whether_its_length_is_declared_or_not(server) -> None:
    assert server.call("POST", "/v1/metaserver", b"x" * 10_001)[0] == 413
    with socket.create_connection((HOST, server.port), timeout=10) as sock:
        sock.sendall(b"POST /v1/metaserver HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert b" 413 " in sock.recv(1000)  # at once: nothing of the body was sent
    chunked = b"2711\r\n" + b"x" * 10_001 + b"\r\n0\r\n\r\n"
    head = b"POST /v1/metaserver HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((HOST, server.port), timeout=10) as sock:
        sock.sendall(head + chunked)
        assert b" 413 " in sock.recv(1000)


def test_unknown_paths_and_methods_are_refused(server) -> None:
    assert server.call("GET", "/v1/nothing")[0] == 404
    assert server.call("PUT", "/v1/metaserver")[0] == 405


def test_a_full_metaserver_says_503_and_takes_more_when_there_is_room() -> None:
    with metaserver(max_reservations=1, max_waits=1) as server:
        server.post(reservation("one"))
        status, answer = server.post(reservation("two"))
        assert (status, answer["error"]["type"]) == (503, "server_busy")
        server.call("DELETE", "/v1/reservations/one")
        assert server.post(reservation("two"))[0] == 202
        waiting = Waiting(server, "/v1/reservations/three?wait_s=30")
        eventually(lambda: server.metaserver.rendezvous.num_waits == 1)
        assert server.call("GET", "/v1/reservations/four?wait_s=30")[0] == 503
        server.call("DELETE", "/v1/reservations/three")
        assert waiting.answer()[0] == 410


def test_many_wait_at_once_and_none_costs_a_thread() -> None:
    with metaserver() as server:
        threads = threading.active_count()
        socks = []
        for number in range(300):
            sock = socket.create_connection((HOST, server.port), timeout=10)
            sock.sendall(f"GET /v1/reservations/t{number}?wait_s=30 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            socks.append(sock)
        eventually(lambda: server.metaserver.rendezvous.num_waits == 300)
        assert threading.active_count() == threads
        for number in range(300):
            server.post(reservation(f"t{number}"))
        assert all(b" 200 OK" in sock.recv(4000) for sock in socks)
        for sock in socks:
            sock.close()


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/v1/metaserver"),
        ("GET", "/v1/reservations/t"),
        ("DELETE", "/v1/reservations/t"),
        ("POST", "/v1/engines"),
        ("GET", "/v1/engines"),
        ("DELETE", "/v1/engines/e"),
    ],
)
def test_only_holders_of_the_secret_are_heard(secured, method, target) -> None:
    for secret in (b"", b"another secret, just as long"):
        status, answer = secured.call(method, target, secret=secret)
        assert status == 401
        assert SECRET.decode() not in str(answer)


def test_holders_of_the_secret_get_signed_answers_and_health_needs_none() -> None:
    with metaserver(secret=SECRET) as server:
        assert server.post(reservation())[0] == 202
        assert server.call("GET", "/v1/reservations/t1", secret=SECRET)[0] == 200
        assert server.call("GET", "/v1/reservations/t2", secret=SECRET)[0] == 404
        assert server.call("GET", "/health", secret=b"")[0] == 200
        assert server.call("GET", "/metrics", secret=b"")[0] == 200


def test_a_signature_for_another_body_or_target_is_refused() -> None:
    with metaserver(secret=SECRET) as server:
        body = msgspec.json.encode(reservation())
        good = server.post(reservation())
        assert good[0] == 202
        forged = {
            "X-Ascend-PD-Nonce": "0" * 32,
            "X-Ascend-PD-Signature": "0" * 64,
        }
        assert server.call("POST", "/v1/metaserver", body, **forged)[0] == 401
        assert server.call("POST", "/v1/metaserver?x", body, **{"X-Ascend-PD-Signature": "é"})[0] == 401


def test_metrics_count_what_happened() -> None:
    with metaserver() as server:
        server.post(reservation("one"))
        server.post(reservation("one"))
        server.post(reservation("one", sink_port=2))
        server.call("GET", "/v1/reservations/one")
        server.call("POST", "/v1/metaserver", b"x")
        status, text = server.call("GET", "/metrics")
    lines = text.decode().splitlines()
    assert status == 200
    for line in (
        "ascend_pd_metaserver_reservations 1.0",
        'ascend_pd_metaserver_posts_total{outcome="accepted"} 1.0',
        'ascend_pd_metaserver_posts_total{outcome="known"} 1.0',
        'ascend_pd_metaserver_posts_total{outcome="conflict"} 1.0',
        'ascend_pd_metaserver_lookups_total{outcome="found"} 1.0',
        'ascend_pd_metaserver_refused_total{status="422"} 1.0',
    ):
        assert line in lines


def test_engines_register_are_listed_and_say_goodbye(server) -> None:
    entry = {"engine_id": "p0", "epoch": "1", "role": "prefill", "host": "h", "side_channel_port": 36000}
    assert server.call("POST", "/v1/engines", msgspec.json.encode(entry))[0] == 200
    status, listed = server.call("GET", "/v1/engines?role=prefill")
    assert (status, [e["engine_id"] for e in listed["engines"]]) == (200, ["p0"])
    assert server.call("GET", "/v1/engines?role=decode") == (200, {"engines": []})
    assert server.call("GET", "/v1/engines?role=both")[1]["error"]["param"] == "role"
    assert (
        server.call("POST", "/v1/engines", msgspec.json.encode(entry | {"role": "x"}))[1]["error"]["param"]
        == "role"
    )
    assert server.call("DELETE", "/v1/engines/p0?epoch=0")[0] == 404
    assert server.call("DELETE", "/v1/engines/p0?epoch=1")[0] == 200


def test_settings_do_not_show_their_secret() -> None:
    assert "shared secret" not in repr(Settings(secret=SECRET))


def into_fastapi(app: Starlette) -> Starlette:
    host = FastAPI()
    host.mount("/rendezvous", app)
    return host


def test_it_works_signed_when_mounted_in_another_app() -> None:
    with metaserver(secret=SECRET, mount=into_fastapi) as server:
        body = msgspec.json.encode(reservation())
        assert server.call("POST", "/rendezvous/v1/metaserver", body, secret=SECRET)[0] == 202
        assert server.call("GET", "/rendezvous/v1/reservations/t1", secret=SECRET)[0] == 200


def test_endless_headers_cost_their_sender_the_connection(server) -> None:
    with socket.create_connection((HOST, server.port), timeout=10) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            for number in range(1000):
                sock.sendall(b"X-%d: " % number + b"a" * 10_000 + b"\r\n")
    assert server.call("GET", "/health")[0] == 200


def fetch(port: int, target: str) -> bytes:
    with socket.create_connection((HOST, port), timeout=10) as sock:
        sock.sendall(f"GET {target} HTTP/1.0\r\n\r\n".encode())
        return b"".join(iter(lambda: sock.recv(65536), b""))


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "metaserver", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_process_is_ready_when_it_says_so_and_a_signal_ends_it_with_0_although_somebody_waits(
    tmp_path,
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    process = start("--port", "0", "--secret-file", str(secret))
    try:
        ready = process.stderr.readline()
        assert "authenticated" in ready
        port = int(ready.split(f"{HOST}:")[1].split(",")[0])
        with socket.create_connection((HOST, port), timeout=10) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 OK" in sock.recv(1000)
            target = "/v1/reservations/t?wait_s=60"
            lines = "".join(
                f"{k}: {v}\r\n" for k, v in HttpSigner(SECRET).request_headers("GET", target, NONCE, b"").items()
            )
            sock.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
            waits = b"ascend_pd_metaserver_waits 1.0"
            eventually(lambda: waits in fetch(port, "/metrics"))
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert b" 404 " in sock.recv(1000)
        assert SECRET.decode() not in ready + process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_the_process_raises_its_soft_limit_of_files_for_one_per_wait() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    command = f"ulimit -S -n 200; exec {sys.executable} -m metaserver --port 0"
    process = subprocess.Popen(["sh", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert "NOT authenticated" in process.stderr.readline()
        soft, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft == (1 << 17 if hard == resource.RLIM_INFINITY else min(hard, 1 << 17))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_taken_port_ends_the_process_with_2_and_one_line() -> None:
    with socket.create_server((HOST, 0)) as taken:
        process = start("--port", str(taken.getsockname()[1]))
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert "cannot listen on" in errors


@pytest.mark.parametrize(
    "options", [("--port", "70000"), ("--port", "-1"), ("--host", "a" * 70), ("--host", "a..b")]
)
def test_an_impossible_place_to_listen_ends_the_process_with_2_and_one_line(options: tuple[str, str]) -> None:
    process = start(*options)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert "cannot listen on" in errors


def test_a_missing_secret_file_ends_the_process_with_2_and_one_line() -> None:
    process = start("--port", "0", "--secret-file", "/nowhere/secret")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert errors.startswith("metaserver: secret file /nowhere/secret")
