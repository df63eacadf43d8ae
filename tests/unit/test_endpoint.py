"""An engine on the side channel: who may pair with it, and what it says when it must be restarted."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from ascend_pd.errors import PairingError
from ascend_pd.wire.connector_config import ConnectorConfig
from ascend_pd.wire.identity import Fingerprint
from ascend_pd.wire.messages import Answer, Reply, Request, Verdict, WorkerInfo
from connectors.endpoint import EngineEndpoint
from connectors.handshake import shake_hands
from connectors.peers import PeerDirectory
from connectors.settings import ConnectorSettings
from connectors.sidechannel.client import SideChannelClient
from tests.unit.layout.caches import engine

FINGERPRINT = Fingerprint(
    architecture="Toy",
    model_config_hash="1",
    num_layers=2,
    num_kv_heads=2,
    head_size=16,
    kv_cache_dtype="float32",
    hardware="cpu",
    tokenizer_hash="t",
    chat_template_hash="c",
)


def refuse(request: Request) -> Reply:
    return Answer(verdict=Verdict.REFUSED)


def opened(role: str, tp_size: int) -> Iterator[EngineEndpoint]:
    settings = ConnectorSettings(
        config=ConnectorConfig(),
        engine_id=role,
        side_port=0,
        is_producer=role == "prefill",
        is_consumer=role == "decode",
        recompute=False,
        tp_size=tp_size,
        pp_size=1,
        block_size=128,
        secret=b"",
    )
    endpoint = EngineEndpoint(settings, FINGERPRINT, refuse, lambda now: None)
    endpoint.start()
    yield endpoint
    endpoint.close()


@pytest.fixture
def endpoint() -> Iterator[EngineEndpoint]:
    yield from opened("decode", 2)


@pytest.fixture
def prefill() -> Iterator[EngineEndpoint]:
    yield from opened("prefill", 1)


@pytest.fixture
def client() -> Iterator[SideChannelClient]:
    opened = SideChannelClient(b"", "prefill")
    yield opened
    opened.close()


def workers(tp_size: int) -> tuple[WorkerInfo, ...]:
    """What an engine with so many ranks publishes."""
    return tuple(
        WorkerInfo(tp_rank=rank, pp_rank=0, transport="mooncake/tcp", session="", layout=worker.layout)
        for rank, worker in enumerate(engine("joined_head_major", tp_size, 4))
    )


def shake(
    client: SideChannelClient, endpoint: EngineEndpoint, fingerprint: Fingerprint = FINGERPRINT, tp: int = 0
) -> str:
    reply = shake_hands(
        client,
        endpoint.address,
        fingerprint,
        role="prefill",
        transport_name="mooncake/tcp",
        expected_tp=tp,
        timeout_s=10.0,
    )
    return reply.engine.engine_id


def test_equal_engines_shake_hands(endpoint: EngineEndpoint, client: SideChannelClient) -> None:
    assert shake(client, endpoint) == "decode"


def test_another_template_is_refused_with_both_values(endpoint: EngineEndpoint, client: SideChannelClient) -> None:
    other = msgspec.structs.replace(FINGERPRINT, chat_template_hash="d")
    with pytest.raises(PairingError, match="chat_template_hash: prefill has 'd', decode has 'c'"):
        shake(client, endpoint, other)


def test_a_named_tp_size_that_differs_is_refused(endpoint: EngineEndpoint, client: SideChannelClient) -> None:
    with pytest.raises(PairingError, match="names tp_size 4, the peer has 2"):
        shake(client, endpoint, tp=4)


def test_an_engine_that_must_be_restarted_takes_nothing_new(
    endpoint: EngineEndpoint, client: SideChannelClient
) -> None:
    endpoint.declare_unsound("transfer t: the endpoint could not be destroyed")
    endpoint.declare_unsound("a consequence")
    with pytest.raises(PairingError, match="must be restarted: transfer t: the endpoint could not be destroyed"):
        shake(client, endpoint)


def test_a_prefill_with_a_smaller_tp_is_refused_when_the_two_meet(
    endpoint: EngineEndpoint, client: SideChannelClient
) -> None:
    """Also where no cluster file was checked before."""
    reason = "tp-not-multiple: prefill's tensor parallel size 1 is not a multiple of decode's 2"
    endpoint.publish(workers(2))
    sinks = PeerDirectory(client, FINGERPRINT, workers(1)[0].layout, "mooncake/tcp", push=True)
    with pytest.raises(PairingError, match=reason):
        sinks.peer(endpoint.address, endpoint.ref, 10.0)


def test_a_decode_with_a_larger_tp_is_refused_when_the_two_meet(
    prefill: EngineEndpoint, client: SideChannelClient
) -> None:
    prefill.publish(workers(1))
    sources = PeerDirectory(client, FINGERPRINT, workers(2)[0].layout, "mooncake/tcp", push=False)
    with pytest.raises(PairingError, match="tp-not-multiple"):
        sources.peer(prefill.address, prefill.ref, 10.0)


@pytest.mark.parametrize("here", [True, False])
def test_engines_that_disagree_about_checksums_are_refused_before_anything_moves(
    prefill: EngineEndpoint, client: SideChannelClient, here: bool
) -> None:
    prefill.publish(tuple(msgspec.structs.replace(worker, checksums=not here) for worker in workers(1)))
    layout = workers(1)[0].layout
    sources = PeerDirectory(client, FINGERPRINT, layout, "mooncake/tcp", push=False, checksum=here)
    with pytest.raises(PairingError, match=r"connector.checksum is (on|off) here and (off|on) at prefill"):
        sources.peer(prefill.address, prefill.ref, 10.0)
