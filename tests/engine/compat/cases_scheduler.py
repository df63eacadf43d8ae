"""vLLM's real scheduler with a connector built on the adapter: what the connectors rely on, in every series."""

from __future__ import annotations

from pathlib import Path

import pytest

import connectors.compat as compat
from tests.engine.compat.scheduler_rig import BLOCK, Rig, engine_config

PRODUCE = {"do_remote_decode": True}
CONSUME = {"do_remote_prefill": True}


def rig(tmp_path: Path, role: str, policy: str = "fail") -> Rig:
    return Rig(engine_config(tmp_path, "Recorder", "tests.engine.compat.recorder", role=role, policy=policy))


def test_the_module_path_loads_our_class(tmp_path: Path) -> None:
    engine = rig(tmp_path, "kv_producer")
    assert type(engine.connector).__name__ == "Recorder"
    assert engine.connector.role is compat.KVConnectorRole.SCHEDULER


def test_a_finished_prefill_hands_over_the_blocks_of_its_computed_tokens_and_keeps_them(tmp_path: Path) -> None:
    engine = rig(tmp_path, "kv_producer")
    free = engine.free_blocks
    engine.add("p", 3 * BLOCK, PRODUCE)
    engine.step()
    ended = engine.finished()["p"]
    # A fourth block was allocated in some series for the sampled token; its content is nobody's.
    assert engine.connector.of("ended") == [("p", [3])]
    assert [len(ids) for ids in ended.kv_transfer_params["remote_block_ids"]] == [3]
    engine.step()
    assert engine.free_blocks < free
    engine.step(finished_sending={"p"})
    assert engine.free_blocks == free
    assert not engine.scheduler.has_requests()


def test_a_chunked_prefill_ends_once_with_all_its_blocks(tmp_path: Path) -> None:
    engine = rig(tmp_path, "kv_producer")
    engine.add("p", 300, PRODUCE)
    scheduled = [engine.step().num_scheduled_tokens for _ in range(3)]
    assert scheduled == [{"p": 128}, {"p": 128}, {"p": 44}]
    assert engine.connector.of("ended") == [("p", [10])]


def test_an_abort_in_the_middle_hands_over_what_was_computed(tmp_path: Path) -> None:
    from vllm.v1.request import RequestStatus

    engine = rig(tmp_path, "kv_producer")
    engine.add("p", 300, PRODUCE)
    engine.step()
    engine.scheduler.finish_requests("p", RequestStatus.FINISHED_ABORTED)
    assert engine.connector.of("ended") == [("p", [4])]


def test_a_held_request_keeps_the_engine_stepping(tmp_path: Path) -> None:
    engine = rig(tmp_path, "kv_producer")
    engine.add("p", BLOCK, PRODUCE)
    for _ in range(3):
        engine.step()
        assert engine.scheduler.has_requests()


def test_the_connector_is_asked_at_every_step_when_outputs_are_aggregated(tmp_path: Path) -> None:
    engine = rig(tmp_path, "kv_producer")
    engine.add("p", BLOCK, PRODUCE)
    for _ in range(4):
        engine.step()
    assert len(engine.connector.of("output")) == 4


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 200])
def test_a_received_prompt_is_decoded_after_one_more_token(tmp_path: Path, num_tokens: int) -> None:
    engine = rig(tmp_path, "kv_consumer")
    engine.add("d", num_tokens, CONSUME)
    assert engine.step().num_scheduled_tokens == {}
    blocks = -(-num_tokens // BLOCK)
    assert engine.connector.of("alloc") == [("d", blocks, num_tokens)]
    engine.step(finished_recving={"d"})
    assert engine.step().num_scheduled_tokens == {"d": 1}
    assert engine.finished()["d"].new_token_ids == [42]
    assert engine.connector.of("alloc")[1][2] == 0


def test_an_aborted_wait_keeps_its_blocks_until_the_receive_is_over(tmp_path: Path) -> None:
    from vllm.v1.request import RequestStatus

    engine = rig(tmp_path, "kv_consumer")
    free = engine.free_blocks
    engine.add("d", 100, CONSUME)
    engine.step()
    engine.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert engine.free_blocks < free
    engine.step(finished_recving={"d"})
    assert engine.free_blocks == free


def failure(engine: Rig, request_id: str) -> dict[str, set[object]]:
    """The report of a failed load that this series understands."""
    if compat.FEATURES.fails_by_request:
        return {"finished_recving": {request_id}, "failed_recving": {request_id}}
    return {"finished_recving": {request_id}, "invalid_block_ids": set(engine.connector.allocated[0])}


def test_a_failed_receive_ends_the_request_with_an_error(tmp_path: Path) -> None:
    engine = rig(tmp_path, "kv_consumer")
    free = engine.free_blocks
    engine.add("d", 100, CONSUME)
    engine.step()
    engine.step(**failure(engine, "d"))
    engine.step()
    assert str(engine.finished()["d"].finish_reason) == "error"
    assert engine.free_blocks == free


def test_a_failed_receive_is_computed_locally_when_the_operator_says_so(tmp_path: Path) -> None:
    engine = rig(tmp_path, "kv_consumer", "recompute")
    engine.add("d", 100, CONSUME)
    engine.step()
    engine.step(**failure(engine, "d"))
    assert engine.step().num_scheduled_tokens == {"d": 100}
    assert engine.finished()["d"].new_token_ids == [42]


def test_block_ids_may_fail_before_the_receive_is_over(tmp_path: Path) -> None:
    engine = rig(tmp_path, "kv_consumer")
    free = engine.free_blocks
    engine.add("d", 100, CONSUME)
    engine.step()
    engine.step(invalid_block_ids=set(engine.connector.allocated[0]))
    assert str(engine.finished()["d"].finish_reason) == "error"
    assert engine.free_blocks < free
    engine.step(finished_recving={"d"})
    assert engine.free_blocks == free


def test_a_local_hit_is_offered_in_whole_blocks(tmp_path: Path) -> None:
    engine = rig(tmp_path, "kv_consumer")
    engine.add("d", 100, CONSUME)
    engine.step()
    engine.step(finished_recving={"d"})
    engine.step()
    again = engine.add("d", 100, CONSUME)
    engine.step()
    offered = engine.connector.of("matched")[-1][1]
    assert offered == 96
    assert again.num_tokens == 100
