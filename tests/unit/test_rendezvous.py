"""The connectors' client of the metaserver, against a real one."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from ascend_pd.errors import RemoteProtocolError, TransferError, UnreachableError
from ascend_pd.metaserver_client import MetaserverClient
from ascend_pd.wire.params import Reservation
from ascend_pd.wire.registry import EngineEntry
from connectors.sidechannel.rendezvous import RendezvousClient
from tests.unit.metaserver_fixture import HOST, SECRET, metaserver, reservation


@pytest.fixture
def client() -> Iterator[RendezvousClient]:
    client = RendezvousClient(SECRET, "d0", repost_s=0.05)
    yield client
    client.close()
    assert not client._thread.is_alive()


def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def test_the_proxy_asks_from_its_own_event_loop() -> None:
    async def ask(url: str) -> Reservation:
        client = MetaserverClient(SECRET)
        deadline = time.monotonic() + 20
        entry = EngineEntry(engine_id="d0", epoch="1", role="decode", host=HOST, side_channel_port=36000)
        try:
            await client.register(url, entry, deadline)
            waiting = asyncio.create_task(client.wait_for(url, "t1", deadline))
            await client.post(url, reservation("t1"), deadline)
            found = await waiting
            await client.withdraw(url, "t1", "done", deadline)
            with pytest.raises(TransferError, match="done"):
                await client.wait_for(url, "t1", deadline)
            engines = [
                [engine.engine_id for engine in await client.engines(url, role, deadline)]
                for role in ("", "decode", "prefill")
            ]
            assert engines == [["d0"], ["d0"], []]
            with pytest.raises(RemoteProtocolError, match="role"):
                await client.engines(url, "both", deadline)
        finally:
            await client.close()
        return found

    with metaserver(secret=SECRET) as server:
        assert same(asyncio.run(ask(server.url)), reservation("t1"))


def free_port() -> int:
    with socket.create_server((HOST, 0)) as sock:
        return sock.getsockname()[1]


def same(found: Reservation, expected: Reservation) -> bool:
    return msgspec.structs.replace(found, deadline_seconds=1.0) == msgspec.structs.replace(
        expected, deadline_seconds=1.0
    )


def test_p_gets_what_d_announced_whoever_comes_first(client) -> None:
    with metaserver(secret=SECRET) as server:
        early = client.wait_for(server.url, "t1", 20)
        client.announce(server.url, reservation("t1")).result(20)
        late = client.wait_for(server.url, "t1", 20)
        for found in (early.result(20), late.result(20)):
            assert same(found, reservation("t1"))
            assert found.deadline_seconds < 30


def test_a_base_url_may_end_in_a_slash(client) -> None:
    with metaserver(secret=SECRET) as server:
        client.announce(server.url + "/", reservation("t1")).result(20)
        assert client.wait_for(server.url + "/", "t1", 20).result(20)


def test_a_metaserver_that_comes_late_is_found(client) -> None:
    port = free_port()
    url = f"http://{HOST}:{port}"
    announced, awaited = client.announce(url, reservation("t1")), client.wait_for(url, "t1", 20)
    time.sleep(0.1)
    assert not announced.done() and not awaited.done()
    with metaserver(port, secret=SECRET):
        announced.result(20)
        assert same(awaited.result(20), reservation("t1"))


def test_a_restarted_metaserver_is_told_again_and_asked_again(client) -> None:
    with metaserver(secret=SECRET) as first:
        port = first.port
        client.announce(first.url, reservation("t1")).result(20)
        waiting = client.wait_for(first.url, "t2", 30)
        eventually(lambda: first.metaserver.rendezvous.num_waits == 1)
    with metaserver(port, secret=SECRET) as second:
        assert same(client.wait_for(second.url, "t1", 20).result(20), reservation("t1"))
        client.announce(second.url, reservation("t2"))
        assert same(waiting.result(20), reservation("t2"))


def test_a_settled_reservation_is_not_posted_again_and_stays_for_other_ranks(client) -> None:
    with metaserver(secret=SECRET) as server:
        posts = count_posts(server)
        client.announce(server.url, reservation("t1")).result(20)
        eventually(lambda: len(posts) > 2)
        client.settle("t1")
        assert client.wait_for(server.url, "t1", 20).result(
            20
        )  # also: what was under way when it was settled is over
        settled = len(posts)
        time.sleep(0.2)
        assert len(posts) == settled


def count_posts(server) -> list[str]:
    posts: list[str] = []
    rendezvous = server.metaserver.rendezvous
    original = rendezvous.post

    def post(posted: Reservation, num_bytes: int):
        posts.append(posted.transfer_id)
        return original(posted, num_bytes)

    rendezvous.post = post
    return posts


def test_a_reservation_announced_anew_is_posted_by_the_newest_announcement_alone(client) -> None:
    with metaserver(secret=SECRET) as server:
        for _ in range(5):
            client.announce(server.url, reservation("t1")).result(20)
        eventually(lambda: len(client._tasks) == len(client._announcing) == 1)


def test_a_withdrawn_reservation_ends_waits_and_its_own_announcement(client) -> None:
    with metaserver(secret=SECRET) as server:
        client.announce(server.url, reservation("t1")).result(20)
        client.withdraw(server.url, "t1", "client gone & away").result(20)
        with pytest.raises(TransferError, match="client gone & away") as caught:
            client.wait_for(server.url, "t1", 20).result(20)
        assert caught.value.quiesced
        posts = count_posts(server)
        time.sleep(0.2)
        assert not posts


def test_a_wait_ends_at_once_when_the_reservation_is_withdrawn(client) -> None:
    with metaserver(secret=SECRET) as server:
        waiting = client.wait_for(server.url, "t1", 60)
        eventually(lambda: server.metaserver.rendezvous.num_waits == 1)
        client.withdraw(server.url, "t1", "cancelled")
        with pytest.raises(TransferError, match="cancelled"):
            waiting.result(20)


def test_withdrawing_at_once_after_announcing_leaves_nothing_waiting(client) -> None:
    with metaserver(secret=SECRET) as server:
        for number in range(50):
            announced = client.announce(server.url, reservation(f"t{number}"))
            client.withdraw(server.url, f"t{number}", "changed its mind").result(20)
            assert announced.done() or announced.exception(20)
        assert not client._announcing
        assert len(server.metaserver.rendezvous.store) == 0


def test_deadlines_end_announcing_and_waiting_without_a_metaserver(client) -> None:
    url = f"http://{HOST}:{free_port()}"
    announced = client.announce(url, reservation("t1", deadline_seconds=0.1))
    waiting = client.wait_for(url, "t2", 0.1)
    for future in (announced, waiting):
        with pytest.raises(UnreachableError, match="metaserver http"):
            future.result(20)


def test_a_metaserver_that_never_answers_ends_at_the_deadline(client) -> None:
    with socket.create_server((HOST, 0)) as mute:
        waiting = client.wait_for(f"http://{HOST}:{mute.getsockname()[1]}", "t1", 0.1)
        with pytest.raises(UnreachableError):
            waiting.result(20)


def test_no_reservation_by_the_deadline_is_an_error(client) -> None:
    with metaserver(secret=SECRET) as server, pytest.raises(UnreachableError, match="no reservation for t1"):
        client.wait_for(server.url, "t1", 0.1).result(20)


def test_a_refused_reservation_says_why(client) -> None:
    with metaserver(secret=SECRET) as server:
        client.announce(server.url, reservation("t1")).result(20)
        client.settle("t1")
        with pytest.raises(RemoteProtocolError, match="HTTP 409: another reservation"):
            client.announce(server.url, reservation("t1", sink_port=1)).result(20)


def test_another_secret_is_an_error_at_once_on_either_side(client) -> None:
    complaint = r"not signed with our secret.*signed with another secret"
    with (
        metaserver(secret=b"another secret, just as long") as server,
        pytest.raises(RemoteProtocolError, match=complaint),
    ):
        client.announce(server.url, reservation("t1")).result(20)
    with metaserver() as server, pytest.raises(RemoteProtocolError, match="the metaserver has no secret"):
        client.wait_for(server.url, "t1", 20).result(20)
    unsigned = RendezvousClient(b"", "p0")
    with metaserver(secret=SECRET) as server, pytest.raises(RemoteProtocolError, match="is not signed"):
        unsigned.wait_for(server.url, "t1", 20).result(20)
    unsigned.close()


def test_something_else_at_the_address_is_not_believed(client) -> None:
    unsigned = RendezvousClient(b"", "p0")
    with metaserver() as server, pytest.raises(RemoteProtocolError, match="HTTP 404"):
        unsigned.announce(server.url + "/elsewhere", reservation("t1")).result(20)
    unsigned.close()


class Impostor(http.server.BaseHTTPRequestHandler):
    """Answers everything at once with 404 and a body of `length` bytes."""

    length, asked = 0, 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(404)
        self.send_header("Content-Length", str(self.length))
        self.end_headers()
        self.wfile.write(bytes(self.length))

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def impostor(length: int) -> Iterator[tuple[str, type[Impostor]]]:
    handler = type("Handler", (Impostor,), {"length": length})
    server = http.server.ThreadingHTTPServer((HOST, 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}", handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_who_says_no_at_once_is_not_asked_without_a_pause() -> None:
    client = RendezvousClient(b"", "p0")
    with impostor(0) as (url, handler), pytest.raises(UnreachableError):
        client.wait_for(url, "t1", 1.0).result(20)
    assert 1 <= handler.asked <= 10
    client.close()


def test_an_endless_answer_is_cut_off() -> None:
    client = RendezvousClient(b"", "p0")
    with impostor(5 << 20) as (url, _), pytest.raises(RemoteProtocolError, match="longer than"):
        client.wait_for(url, "t1", 20).result(20)
    client.close()


def test_a_cancelled_wait_stops_asking(client) -> None:
    with metaserver(secret=SECRET) as server:
        waiting = client.wait_for(server.url, "t1", 60)
        eventually(lambda: server.metaserver.rendezvous.num_waits == 1)
        assert waiting.cancel()
        eventually(lambda: not client._tasks)


def test_hundreds_wait_on_one_thread() -> None:
    client = RendezvousClient(SECRET, "d0")
    with metaserver(secret=SECRET) as server:
        waiting = [client.wait_for(server.url, f"t{number}", 60) for number in range(200)]
        eventually(lambda: server.metaserver.rendezvous.num_waits == 200)
        for number in range(200):
            client.announce(server.url, reservation(f"t{number}"))
        assert [w.result(20).transfer_id for w in waiting] == [f"t{number}" for number in range(200)]
        client.close()


def test_what_is_under_way_is_bounded() -> None:
    client = RendezvousClient(SECRET, "p0", max_pending=2)
    with metaserver(secret=SECRET) as server:
        for name in ("a", "b"):
            client.wait_for(server.url, name, 60)
        with pytest.raises(UnreachableError, match="2 requests"):
            client.wait_for(server.url, "c", 60).result(20)
        client.close()


def test_closing_fails_what_is_under_way_and_what_comes_later() -> None:
    client = RendezvousClient(SECRET, "p0")
    url = f"http://{HOST}:{free_port()}"
    futures = [client.wait_for(url, "t1", 60), client.announce(url, reservation("t2"))]
    futures += [client.withdraw(url, "t3", "x")]
    client.close()
    futures.append(client.wait_for(url, "t4", 60))
    for future in futures:
        with pytest.raises(UnreachableError):
            future.result(5)
    client.close()


def test_an_engine_stays_registered_while_it_lives(client) -> None:
    entry = EngineEntry(
        engine_id="d0", epoch="1", role="decode", host=HOST, side_channel_port=36000, ttl_seconds=0.15
    )
    with metaserver(secret=SECRET) as server:
        client.register(server.url, entry)
        engines = server.metaserver._engines
        eventually(lambda: engines.live(time.monotonic()))
        for _ in range(30):
            time.sleep(0.01)
        eventually(lambda: engines.live(time.monotonic()))
        client.close()
        eventually(lambda: not engines.live(time.monotonic()))
