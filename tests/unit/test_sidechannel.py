"""Client and server of the side channel over loopback."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import zmq

from ascend_pd.errors import OperatorError, RemoteProtocolError, UnreachableError
from ascend_pd.wire.frames import MAX_REQUEST_BYTES, FrameCodec
from ascend_pd.wire.messages import Answer, Ask, Release, Renew, Reply, Request, Story, Verdict
from connectors.handoff.faults import FaultInjector, parse_faults
from connectors.sidechannel.client import SideChannelClient
from connectors.sidechannel.server import SideChannelServer

SECRET = b"a shared secret of some length"
HOST = "127.0.0.1"
RENEW = Renew(transfer_id="t", source_epoch="e")


def echo(request: Request) -> Reply:
    """A story for who asks, with the transfer in it; OK for all else."""
    if isinstance(request, Ask):
        return Story(known=True, reason=request.transfer_id)
    return Answer(verdict=Verdict.OK)


@contextmanager
def serving(handler=echo, port: int = 0, secret: bytes = SECRET, **kwargs) -> Iterator[SideChannelServer]:
    server = SideChannelServer(HOST, port, secret, handler, "p0@1", **kwargs)
    server.start()
    try:
        yield server
    finally:
        server.close()
        assert not server.alive


@pytest.fixture
def client() -> Iterator[SideChannelClient]:
    client = SideChannelClient(SECRET, "d0@1")
    yield client
    client.close()


@contextmanager
def raw_dealer(port: int) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.connect(f"tcp://{HOST}:{port}")
    try:
        yield sock
    finally:
        sock.close(linger=0)
        context.term()


def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def test_a_request_is_answered(client) -> None:
    with serving() as server:
        assert client.request((HOST, server.port), Ask(transfer_id="t1"), 5) == Story(known=True, reason="t1")
        assert server.counters() == {"received.ask": 1}


def test_answers_find_their_requests_when_many_threads_ask_two_engines(client) -> None:
    asked: tuple[set[str], set[str]] = (set(), set())  # a set, for on a busy machine a request is repeated

    def remember(engine: int, request: Request) -> Reply:
        asked[engine].add(request.transfer_id)
        return echo(request)

    with serving(partial(remember, 0)) as one, serving(partial(remember, 1)) as two:
        wrong = []

        def ask(number: int, port: int) -> None:
            for i in range(50):
                name = f"{number}-{i}"
                if client.request((HOST, port), Ask(transfer_id=name), 10) != Story(known=True, reason=name):
                    wrong.append(name)

        threads = [threading.Thread(target=ask, args=(n, (one, two)[n % 2].port)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        for engine, server in enumerate((one, two)):
            assert asked[engine] == {f"{n}-{i}" for n in range(engine, 6, 2) for i in range(50)}
            assert server.counters()["received.ask"] >= 150


def test_a_dead_peer_delays_nobody_else(client) -> None:
    with socket.create_server((HOST, 0)) as mute, serving() as server:
        stuck = [client.submit((HOST, mute.getsockname()[1]), RENEW, 30) for _ in range(300)]
        answers = [client.submit((HOST, server.port), Ask(transfer_id=str(i)), 10) for i in range(300)]
        assert [a.result().reason for a in answers] == [str(i) for i in range(300)]
        assert not any(s.done() for s in stuck)


def test_no_answer_by_the_deadline_is_an_error_that_names_peer_and_message(client) -> None:
    with socket.create_server((HOST, 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(UnreachableError, match=f"renew to {HOST}:{port}.*never connected"):
            client.request((HOST, port), RENEW, 0.1)


def test_a_request_is_repeated_until_it_is_answered(client) -> None:
    seen = []

    def deaf_at_first(request: Request) -> Reply:
        seen.append(request)
        if len(seen) < 3:
            raise RuntimeError("not yet")
        return Answer(verdict=Verdict.OK)

    with serving(deaf_at_first) as server:
        assert client.request((HOST, server.port), RENEW, 10).verdict is Verdict.OK
        assert seen == [RENEW] * 3
        assert server.counters()["handler_failed"] == 2
        assert server.alive


def test_a_request_outlives_the_restart_of_its_peer_on_the_same_port(client) -> None:
    with serving() as first:
        port = first.port
        client.request((HOST, port), RENEW, 5)
    waiting = client.submit((HOST, port), Ask(transfer_id="later"), 20)
    with serving(port=port) as second:
        assert waiting.result().reason == "later"
        assert second.counters()["received.ask"] >= 1


def test_a_peer_that_comes_back_is_not_met_by_a_backlog(client) -> None:
    with serving() as first:
        port = first.port
        client.request((HOST, port), RENEW, 5)
    for _ in range(20):
        with pytest.raises(UnreachableError):
            client.request((HOST, port), RENEW, 0.01)
    with serving(port=port) as second:
        client.request((HOST, port), Ask(transfer_id="fresh"), 10)
        assert "received.renew" not in second.counters()


def test_a_refusal_reaches_the_peer_with_its_reason(client) -> None:
    def refuse(request: Request) -> Reply:
        raise RemoteProtocolError("no such rank")

    with serving(refuse) as server:
        answer = client.request((HOST, server.port), RENEW, 5)
        assert answer == Answer(verdict=Verdict.REFUSED, reason="no such rank")
        assert server.counters()["refused"] == 1


def test_an_answer_of_the_wrong_type_is_the_peers_fault(client) -> None:
    with (
        serving(lambda request: Story(known=True)) as server,
        pytest.raises(RemoteProtocolError, match=r"renew to .* was answered with a story"),
    ):
        client.request((HOST, server.port), RENEW, 5)


@pytest.mark.parametrize(("theirs", "ours"), [(SECRET, b"another secret"), (SECRET, b""), (b"", SECRET)])
def test_a_peer_with_another_secret_is_told_and_never_heard(theirs: bytes, ours: bytes) -> None:
    heard = []
    client = SideChannelClient(ours, "d0@1")
    with serving(lambda request: heard.append(request) or echo(request), secret=theirs) as server:
        with pytest.raises(RemoteProtocolError, match="secretFile"):
            client.request((HOST, server.port), Release(transfer_id="t", reason="steal"), 5)
        assert server.counters() == {"bad_mac": 1}
    client.close()
    assert not heard


def test_another_wire_version_is_told_and_never_heard() -> None:
    with serving(secret=b"") as server, raw_dealer(server.port) as dealer:
        frame = bytearray(FrameCodec().encode_request(bytes(16), "x", RENEW))
        frame[3] = 99
        dealer.send(bytes(frame))
        assert dealer.poll(5000)
        assert b"wire version 99" in dealer.recv()
        assert server.counters() == {"foreign_version": 1}


def test_malformed_and_foreign_frames_are_counted_and_dropped(client) -> None:
    with serving() as server, raw_dealer(server.port) as dealer:
        dealer.send(b"")
        dealer.send(b"garbage")
        dealer.send_multipart([b"", b"a REQ socket"])
        dealer.send_multipart([b"x"] * 100)
        dealer.send_multipart([FrameCodec(SECRET).encode_request(bytes(16), "x", RENEW), b"more"])
        dealer.send(FrameCodec(SECRET).encode_reply(bytes(16), "x", Answer(verdict=Verdict.OK)))
        eventually(lambda: server.counters() == {"foreign": 5, "malformed": 1})
        assert not dealer.poll(0)
        assert client.request((HOST, server.port), RENEW, 5)


def test_bytes_that_are_not_zmq_at_all_do_not_stop_the_server(client) -> None:
    with serving() as server:
        for junk in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 1000):
            with socket.create_connection((HOST, server.port)) as sock:
                sock.sendall(junk)
        assert client.request((HOST, server.port), RENEW, 5)


def test_a_frame_over_the_bound_costs_its_sender_the_connection_and_nobody_else(client) -> None:
    with serving() as server, raw_dealer(server.port) as dealer:
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.send(bytes(MAX_REQUEST_BYTES + 1))
        assert monitor.poll(10_000)
        dealer.disable_monitor()
        monitor.close()
        assert client.request((HOST, server.port), RENEW, 5)
        assert server.counters() == {"received.renew": 1}


def test_a_flood_of_bad_frames_does_not_flood_the_log(caplog) -> None:
    with serving() as server, raw_dealer(server.port) as dealer:
        for _ in range(1000):
            dealer.send(b"noise")
        eventually(lambda: server.counters() == {"foreign": 1000})
    assert 1 <= len(caplog.records) <= 10


def test_timers_run_between_requests_however_many_are_waiting() -> None:
    begun, go, handled = threading.Event(), threading.Event(), []
    when_called: list[int] = []

    def handler(request: Request) -> Reply:
        begun.set()
        go.wait(10)
        handled.append(request)
        return Answer(verdict=Verdict.OK)

    with serving(handler) as server, raw_dealer(server.port) as dealer:
        frame = FrameCodec(SECRET).encode_request(bytes(16), "x", RENEW)
        for _ in range(250):
            dealer.send(frame)
        assert begun.wait(10)
        server.call_soon(lambda: when_called.append(len(handled)))
        go.set()
        eventually(lambda: len(handled) == 250)
        assert when_called[0] < 250


@pytest.mark.timeout(30)
def test_calls_wake_a_server_that_has_nothing_to_do() -> None:
    with serving() as server:
        for _ in range(100):  # each would take up to a second if the server slept on
            ran = threading.Event()
            server.call_soon(ran.set)
            assert ran.wait(10)


def test_an_answer_to_a_peer_that_has_gone_is_counted() -> None:
    begun, go = threading.Event(), threading.Event()

    def handler(request: Request) -> Reply:
        begun.set()
        go.wait(10)
        return Answer(verdict=Verdict.OK)

    with serving(handler) as server:
        with raw_dealer(server.port) as dealer:
            dealer.send(FrameCodec(SECRET).encode_request(bytes(16), "x", RENEW))
            assert begun.wait(10)
        time.sleep(0.2)  # the server's I/O thread has to notice that the connection is closed
        go.set()
        eventually(lambda: server.counters().get("reply_lost") == 1)


def test_a_flood_holds_up_neither_timers_nor_others(client) -> None:
    ticks = []
    fired = threading.Event()

    def tick(now: float) -> float:
        ticks.append(now)
        return now + 0.01

    with serving(tick=tick) as server, raw_dealer(server.port) as dealer:
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                for _ in range(100):
                    dealer.send(b"noise" * 100)

        dealer.set(zmq.SNDTIMEO, 1000)
        thread = threading.Thread(target=flood)
        thread.start()
        try:
            eventually(lambda: server.counters().get("foreign", 0) > 1000)
            before = len(ticks)
            server.call_soon(fired.set)
            assert fired.wait(10)
            assert client.request((HOST, server.port), RENEW, 10)
            eventually(lambda: len(ticks) > before)
        finally:
            stop.set()
            thread.join()


def test_a_taken_port_is_an_operator_error_before_anything_is_started() -> None:
    threads = threading.active_count()
    with (
        socket.create_server((HOST, 0)) as taken,
        pytest.raises(OperatorError, match=rf"{HOST}:{taken.getsockname()[1]} is in use.*kvPort"),
    ):
        SideChannelServer(HOST, taken.getsockname()[1], b"", echo, "p0@1")
    assert threading.active_count() == threads


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_an_operator_error(host: str) -> None:
    with pytest.raises(OperatorError, match=host):
        SideChannelServer(host, 0, b"", echo, "p0@1")


def test_timers_run_without_any_request() -> None:
    ticks: list[float] = []
    done = threading.Event()

    def tick(now: float) -> float | None:
        ticks.append(now)
        if len(ticks) == 3:
            done.set()
            return None
        return now + 0.02

    with serving(tick=tick) as server:
        assert done.wait(5)
        assert ticks[1] >= ticks[0] + 0.02
        assert ticks[2] >= ticks[1] + 0.02
        server.wake()
        eventually(lambda: len(ticks) == 4)


def test_a_tick_that_fails_does_not_end_the_others(client, caplog) -> None:
    def tick(now: float) -> float:
        raise RuntimeError("broken timer")

    with serving(tick=tick) as server:
        eventually(lambda: server.counters().get("tick_failed"))
        assert client.request((HOST, server.port), RENEW, 5)
        assert "broken timer" in caplog.text


def test_calls_run_on_the_servers_thread_in_order() -> None:
    ran: list[tuple[str, str]] = []
    with serving() as server:
        now = time.monotonic()
        server.call_at(now + 0.06, lambda: ran.append(("late", threading.current_thread().name)))
        server.call_at(now + 0.03, lambda: ran.append(("early", threading.current_thread().name)))
        server.call_soon(lambda: ran.append(("soon", threading.current_thread().name)))
        eventually(lambda: len(ran) == 3)
    assert ran == [(what, "sidechannel-p0@1") for what in ("soon", "early", "late")]


def test_closing_a_client_fails_what_is_in_flight() -> None:
    client = SideChannelClient(SECRET, "d0@1")
    with socket.create_server((HOST, 0)) as mute:
        futures = [client.submit((HOST, mute.getsockname()[1]), RENEW, 60) for _ in range(5)]
        client.close()
    for future in futures:
        with pytest.raises(UnreachableError, match="closed"):
            future.result(timeout=0)
    with pytest.raises(UnreachableError, match="closed"):
        client.request((HOST, 1), RENEW, 60)
    client.close()


def test_closing_a_server_frees_its_port_and_may_be_repeated() -> None:
    with serving() as server:
        port = server.port
    server.close()
    never_started = SideChannelServer(HOST, port, b"", echo, "p0@2")
    never_started.close()
    never_started.close()
    with serving(port=port):
        pass


def test_requests_to_one_peer_are_bounded() -> None:
    client = SideChannelClient(SECRET, "d0@1", max_calls_per_peer=3)
    with socket.create_server((HOST, 0)) as mute, serving() as server:
        address = (HOST, mute.getsockname()[1])
        waiting = [client.submit(address, RENEW, 60) for _ in range(3)]
        with pytest.raises(UnreachableError, match="3 requests to this peer"):
            client.request(address, RENEW, 60)
        assert client.request((HOST, server.port), RENEW, 5)
        waiting[0].cancel()
        eventually(lambda: not client.submit(address, RENEW, 60).done())
    client.close()


def test_peers_are_bounded_and_the_longest_idle_makes_room() -> None:
    client = SideChannelClient(SECRET, "d0@1", max_peers=2)
    with serving() as one, serving() as two, serving() as three, socket.create_server((HOST, 0)) as mute:
        for server in (one, two, three, one, two, three):
            assert client.request((HOST, server.port), RENEW, 10)
        assert client.counters()["evicted"] == 4
        assert client.request((HOST, two.port), RENEW, 10)  # three is idle longest now
        assert client.request((HOST, one.port), RENEW, 10)
        assert [port for _, port in client._peers] == [two.port, one.port]
        address = (HOST, mute.getsockname()[1])
        stuck = client.submit(address, RENEW, 60)
        assert client.request((HOST, one.port), RENEW, 10)
        assert client.request((HOST, two.port), RENEW, 10)
        assert not stuck.done()
    client.close()


def test_every_peer_busy_is_an_error_not_a_new_connection() -> None:
    client = SideChannelClient(SECRET, "d0@1", max_peers=1)
    with socket.create_server((HOST, 0)) as mute, serving() as server:
        client.submit((HOST, mute.getsockname()[1]), RENEW, 60)
        with pytest.raises(UnreachableError, match="1 peers have unanswered"):
            client.request((HOST, server.port), RENEW, 5)
    client.close()


def test_an_address_that_cannot_be_one_fails_alone(client) -> None:
    with pytest.raises(UnreachableError):
        client.request(("no such host", 1), RENEW, 0.5)
    with serving() as server:
        assert client.request((HOST, server.port), RENEW, 5)


SERVE = """
import sys
from ascend_pd.wire.messages import Answer, Verdict
from connectors.sidechannel.server import SideChannelServer

server = SideChannelServer("127.0.0.1", 0, sys.argv[1].encode(), lambda r: Answer(verdict=Verdict.OK), "p0@1")
server.start()
print(server.port, flush=True)
sys.stdin.read()
"""


def test_a_stopped_peer_times_out_alone_and_answers_again_when_it_goes_on(client) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, SECRET.decode()],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = (HOST, int(process.stdout.readline()))
        assert client.request(address, RENEW, 10)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        stuck = client.submit(address, RENEW, 0.5)
        waiting = client.submit(address, RENEW, 60)
        with serving() as other:
            assert client.request((HOST, other.port), RENEW, 10)
        with pytest.raises(UnreachableError, match="no answer in time, sent"):
            stuck.result()
        assert not waiting.done()
        process.send_signal(signal.SIGCONT)
        assert waiting.result() == Answer(verdict=Verdict.OK)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


class Plan:
    """A fault hook that plays a list, then nothing."""

    def __init__(self, kind: str, *copies: list[float]) -> None:
        self.kind, self.copies, self.asked = kind, list(copies), []

    def on_send(self, kind: str) -> list[float]:
        self.asked.append(kind)
        return self.copies.pop(0) if kind == self.kind and self.copies else [0.0]


def test_a_lost_request_is_sent_again() -> None:
    plan = Plan("renew", [], [])
    client = SideChannelClient(SECRET, "d0@1", faults=plan)
    with serving() as server:
        assert client.request((HOST, server.port), RENEW, 10)
        assert server.counters() == {"received.renew": 1}
    assert plan.asked == ["renew"] * 3
    client.close()


def test_a_lost_reply_is_asked_for_again(client) -> None:
    with serving(faults=Plan("renew.reply", [])) as server:
        assert client.request((HOST, server.port), RENEW, 10)
        assert server.counters() == {"received.renew": 2}


def test_a_repeated_and_a_delayed_request_arrive_even_after_the_answer() -> None:
    client = SideChannelClient(SECRET, "d0@1", faults=Plan("renew", [0.0, 0.0, 0.1]))
    with serving() as server:
        assert client.request((HOST, server.port), RENEW, 10)
        eventually(lambda: server.counters() == {"received.renew": 3})
    client.close()


def test_a_late_reply_is_counted_and_harms_nobody(client) -> None:
    with serving(faults=Plan("renew.reply", [0.0, 0.05])) as server:
        assert client.request((HOST, server.port), RENEW, 10)
        eventually(lambda: client.counters().get("late") == 1)
        assert client.request((HOST, server.port), RENEW, 10)


def test_secrets_are_not_logged(client, caplog) -> None:
    caplog.set_level("DEBUG")
    with serving(secret=b"another secret entirely") as server:
        with pytest.raises(RemoteProtocolError) as caught:
            client.request((HOST, server.port), RENEW, 5)
        eventually(lambda: "dropped frame" in caplog.text)
    for secret in (SECRET, b"another secret entirely"):
        assert secret.decode() not in caplog.text + repr(caught.value)


def test_a_fault_plan_as_an_operator_writes_it_reaches_both_ends() -> None:
    plan = FaultInjector(parse_faults("drop:renew:1,drop:renew.reply:1,repeat:ask:1"))
    client = SideChannelClient(SECRET, "d0@1", faults=plan)
    with serving(faults=plan) as server:
        assert client.request((HOST, server.port), RENEW, 10)
        assert client.request((HOST, server.port), Ask(transfer_id="t"), 10)
        eventually(lambda: server.counters() == {"received.renew": 2, "received.ask": 2})
    assert plan.counts() == {"drop:renew": 1, "drop:renew.reply": 1, "repeat:ask": 1}
    client.close()
