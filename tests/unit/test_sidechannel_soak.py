"""Ten thousand messages over a bad network, with noise beside them: all are answered and nothing piles up."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import zmq

from ascend_pd.wire.messages import Answer, Ask, Reply, Request, Story, Verdict
from connectors.sidechannel.client import SideChannelClient
from connectors.sidechannel.server import SideChannelServer

HOST = "127.0.0.1"
SECRET = b"a shared secret of some length"
CLIENTS, PER_CLIENT, IN_FLIGHT = 4, 2500, 200


class BadNetwork:
    """Loses, repeats and delays one message in fifty each."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.lost = 0

    def on_send(self, kind: str) -> list[float]:
        draw = self._random.random()
        if draw < 0.02:
            self.lost += 1
            return []
        if draw < 0.04:
            return [0.0, 0.0]
        return [0.05] if draw < 0.06 else [0.0]


class Ledger:
    """Answers with the number of times it was asked, as the server's thread alone can count."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def __call__(self, request: Request) -> Reply:
        if isinstance(request, Ask):
            self.asked[request.transfer_id] += 1
            return Story(known=True, reason=request.transfer_id)
        return Answer(verdict=Verdict.GONE)


@pytest.fixture
def noise() -> Iterator[list[int]]:
    """Ports put into this list are sent random frames until the test ends."""
    ports: list[int] = []
    stop = threading.Event()

    def make() -> None:
        draw = random.Random(7)
        context = zmq.Context()
        sock = context.socket(zmq.DEALER)
        sock.set(zmq.SNDTIMEO, 100)
        while not ports and not stop.wait(0.01):
            pass
        for port in ports:
            sock.connect(f"tcp://{HOST}:{port}")
        while not stop.wait(0.001):
            frame = draw.choice([b"", b"APD\x01\x01", b"APD\x02"]) + draw.randbytes(draw.randrange(200))
            try:
                sock.send_multipart([frame] * draw.choice([1, 1, 1, 2]))
            except zmq.Again:
                continue
        sock.close(linger=0)
        context.term()

    thread = threading.Thread(target=make)
    thread.start()
    yield ports
    stop.set()
    thread.join()


@pytest.mark.timeout(120)
def test_ten_thousand_requests_over_a_bad_network_are_all_answered_rightly(noise) -> None:
    ledger, wrong = Ledger(), []
    ticks: list[float] = []
    network = BadNetwork(1)
    server = SideChannelServer(
        HOST, 0, SECRET, ledger, "p0@1", faults=network, tick=lambda now: ticks.append(now) or now + 0.01
    )
    server.start()
    noise.append(server.port)
    clients = [SideChannelClient(SECRET, f"d{n}@1", faults=BadNetwork(2 + n)) for n in range(CLIENTS)]

    def drive(number: int) -> None:
        room = threading.Semaphore(IN_FLIGHT)
        futures = {}
        for index in range(PER_CLIENT):
            room.acquire()
            name = f"{number}-{index}"
            futures[name] = clients[number].submit((HOST, server.port), Ask(transfer_id=name), 60)
            futures[name].add_done_callback(lambda _: room.release())
        wrong.extend(name for name, future in futures.items() if future.result() != Story(known=True, reason=name))

    threads = [threading.Thread(target=drive, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters = server.counters()
    for client in clients:
        assert client.counters()["answered"] == PER_CLIENT
        assert client.counters()["repeated"] > 0
        assert not client._in_flight
        assert not any(peer.calls or peer.unsent for peer in client._peers.values())
        client.close()
    server.close()
    assert not wrong
    assert network.lost > 0
    assert len(ledger.asked) == CLIENTS * PER_CLIENT
    assert sum(ledger.asked.values()) == counters["received.ask"] > CLIENTS * PER_CLIENT
    assert counters["foreign"] > 0
    assert len(ticks) > 10
