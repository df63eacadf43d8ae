"""Both connectors between two engines of this series: the prompt's whole cache arrives, the blocks come back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import connectors.compat as compat
from ascend_pd.errors import OperatorError
from ascend_pd.wire.identity import Fingerprint, mismatches
from ascend_pd.wire.params import LayerwiseDecode, LayerwisePrefill, PullPrefill, to_dict
from connectors import transport
from connectors.fingerprint import fingerprint_of
from connectors.settings import load_settings
from tests.engine.compat.engine_rig import BLOCK, Engine, joined_cache, one_rank, step_until
from tests.engine.compat.scheduler_rig import cache_config, engine_config
from tests.fakes.loopback_transport import LoopbackTransport
from tests.unit.metaserver_fixture import metaserver

LENGTHS = [BLOCK - 1, BLOCK, 3 * BLOCK + 5, 300]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, one rank, and memory that is copied by memmove."""
    one_rank(monkeypatch)
    monkeypatch.setitem(transport.TRANSPORTS, "mooncake", lambda *_: LoopbackTransport())


@contextmanager
def pair(
    directory: Path, connector: str, aggregates: bool = True, **decode: Any
) -> Iterator[tuple[Engine, Engine]]:
    caches = [[joined_cache(), joined_cache()] for _ in range(2)]
    # The pool is tiny and the steps take no time: let no finished prompt be given up before decode has claimed it.
    patient = {"max_unreserved_blocks": 24}
    prefill = Engine(directory / "m", connector, "kv_producer", caches[0], extra=patient, aggregates=aggregates)
    try:
        engine = Engine(directory / "m", connector, "kv_consumer", caches[1], aggregates=aggregates, **decode)
        try:
            yield prefill, engine
        finally:
            engine.close()
    finally:
        prefill.close()


@pytest.mark.parametrize(("num_tokens", "aggregates"), [*((n, True) for n in LENGTHS), (100, False)])
def test_pull_brings_the_whole_prompt_and_gives_the_blocks_back(
    tmp_path: Path, num_tokens: int, aggregates: bool
) -> None:
    with pair(tmp_path, "MooncakeConnector", aggregates) as (prefill, decode):
        free = prefill.free_blocks
        prefill.add("p", num_tokens, to_dict(PullPrefill(transfer_id=str(uuid.uuid4()))), prompt_of="x")
        step_until(lambda: prefill.finished(), prefill)
        handoff = prefill.finished()["p"].kv_transfer_params
        assert prefill.free_blocks < free
        decode.add("d", num_tokens, handoff, max_tokens=3, prompt_of="x")
        step_until(lambda: decode.scheduler.running, prefill, decode)
        assert decode.wrong_cells("d", num_tokens - 1) == []
        step_until(lambda: decode.finished() and prefill.free_blocks == free, prefill, decode)
        assert decode.finished()["d"].finish_reason is not None


@pytest.mark.parametrize(("num_tokens", "aggregates"), [*((n, True) for n in LENGTHS), (100, False)])
def test_layerwise_brings_the_whole_prompt_and_gives_the_blocks_back(
    tmp_path: Path, num_tokens: int, aggregates: bool
) -> None:
    with metaserver() as served, pair(tmp_path, "MooncakeLayerwiseConnector", aggregates) as (prefill, decode):
        free = prefill.free_blocks
        transfer_id = str(uuid.uuid4())
        decode.add(
            "d", num_tokens, to_dict(LayerwiseDecode(transfer_id=transfer_id, metaserver=served.url)), 3, "x"
        )
        decode.run_step()
        prefill.add(
            "p", num_tokens, to_dict(LayerwisePrefill(transfer_id=transfer_id, metaserver=served.url)), 1, "x"
        )
        step_until(lambda: decode.scheduler.running, prefill, decode)
        assert decode.wrong_cells("d", num_tokens - 1) == []
        step_until(lambda: decode.finished() and prefill.free_blocks == free, prefill, decode)


def test_a_transfer_id_used_again_after_a_pull_fails_and_leaves_nothing(tmp_path: Path) -> None:
    with pair(tmp_path, "MooncakeConnector") as (prefill, decode):
        prefill.add("p", 100, to_dict(PullPrefill(transfer_id=str(uuid.uuid4()))), prompt_of="x")
        step_until(lambda: prefill.finished(), prefill)
        handoff = prefill.finished()["p"].kv_transfer_params
        free = decode.free_blocks
        decode.add("d", 100, handoff, 3, "x")
        step_until(lambda: "d" in decode.finished(), prefill, decode)
        decode.add("again", 200, dict(handoff), 3, "y")
        step_until(lambda: "again" in decode.finished() and decode.free_blocks == free, prefill, decode)
        assert str(decode.finished()["again"].finish_reason) == "error"
        assert not decode.connector._scheduler._decode._handoffs, "its hold would be renewed for ever"


def test_a_transfer_id_used_again_after_a_push_fails_and_leaves_nothing(tmp_path: Path) -> None:
    with metaserver() as served, pair(tmp_path, "MooncakeLayerwiseConnector") as (prefill, decode):
        params = {"transfer_id": str(uuid.uuid4()), "metaserver": served.url}
        free = decode.free_blocks
        decode.add("d", 100, to_dict(LayerwiseDecode(**params)), 3, "x")
        decode.run_step()
        prefill.add("p", 100, to_dict(LayerwisePrefill(**params)), 1, "x")
        step_until(lambda: "d" in decode.finished(), prefill, decode)
        decode.add("again", 200, to_dict(LayerwiseDecode(**params)), 3, "y")
        step_until(lambda: "again" in decode.finished() and decode.free_blocks == free, prefill, decode)
        assert str(decode.finished()["again"].finish_reason) == "error"
        book = decode.connector._scheduler._decode._book
        assert not book.by_request and not book.by_transfer


def push_with_a_shared_prefix(tmp_path: Path, at_once: bool, compute: Callable[[Engine], None]) -> None:
    """Another request computes the same prompt on prefill, in the same step (`at_once`) or in an earlier one."""
    with metaserver() as served, pair(tmp_path, "MooncakeLayerwiseConnector") as (prefill, decode):
        params = {"transfer_id": str(uuid.uuid4()), "metaserver": served.url}
        decode.add("d", 100, to_dict(LayerwiseDecode(**params)), 3, "x")
        decode.run_step()
        prefill.add("other", 100, None, 1, "x")
        if not at_once:
            prefill.run_step()
        prefill.add("p", 100, to_dict(LayerwisePrefill(**params)), 1, "x")
        compute(prefill)
        step = prefill.run_step()
        [hit] = [new.num_computed_tokens for new in step.scheduled_new_reqs if new.req_id == "p"]
        assert hit == 100 // BLOCK * BLOCK
        prefill._compute = lambda kernel: kernel()
        step_until(lambda: decode.scheduler.running, prefill, decode)
        assert decode.wrong_cells("d", 99) == []


def test_a_prefix_that_another_request_of_the_same_step_computes_is_not_pushed_before(tmp_path: Path) -> None:
    def slowly(prefill: Engine) -> None:
        prefill._compute = lambda kernel: (time.sleep(0.4), kernel())[1]

    push_with_a_shared_prefix(tmp_path, True, slowly)


def test_a_prefix_from_an_earlier_step_is_pushed_while_the_first_layer_is_computed(tmp_path: Path) -> None:
    def until_something_went(prefill: Engine) -> None:
        moves = prefill.worker._worker.rank.transport.moves
        prefill._compute = lambda kernel: (step_until(lambda: moves), kernel())[1]

    push_with_a_shared_prefix(tmp_path, False, until_something_went)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_read_that_fails_ends_as_the_operator_says(tmp_path: Path, policy: str) -> None:
    with pair(tmp_path, "MooncakeConnector", policy=policy) as (prefill, decode):
        prefill.add("p", 100, to_dict(PullPrefill(transfer_id=str(uuid.uuid4()))), prompt_of="x")
        step_until(lambda: prefill.finished(), prefill)
        handoff = prefill.finished()["p"].kv_transfer_params
        handoff["prompt_hash"] = "0" * 32
        free = decode.free_blocks
        decode.add("d", 100, handoff, prompt_of="x")
        step_until(lambda: decode.finished(), prefill, decode)
        ended = decode.finished()["d"]
        assert str(ended.finish_reason) == ("error" if policy == "fail" else "length")
        step_until(lambda: decode.free_blocks == free, prefill, decode)


@pytest.mark.parametrize("name", ["MooncakeConnector", "MooncakeConnectorV1", "MooncakeLayerwiseConnector"])
def test_the_module_path_wins_over_connectors_that_others_registered_under_these_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setitem(KVConnectorFactory._registry, name, lambda: pytest.fail("another package's connector"))
    config = engine_config(tmp_path / "m", name, "connectors", role="kv_producer")
    found = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert found.__module__ in ("connectors.pull.connector", "connectors.layerwise.connector")


def test_the_connectors_load_with_this_series(tmp_path: Path) -> None:
    with pair(tmp_path, "MooncakeConnectorV1") as (prefill, _):
        assert isinstance(prefill.connector, compat.ConnectorBase)
        assert type(prefill.connector).__module__ == "connectors.pull.connector"


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_overlapping_steps_are_refused_where_they_could_damage_a_received_cache(tmp_path: Path, role: str) -> None:
    config = engine_config(tmp_path / "m", "MooncakeConnector", "connectors", role=role)
    config.scheduler_config.async_scheduling = True
    if role == "kv_consumer" and not compat.FEATURES.defers_block_free:
        with pytest.raises(OperatorError, match="async scheduling") as refused:
            load_settings(config)
        assert "--no-async-scheduling" in refused.value.fix
    else:
        assert load_settings(config).is_producer is (role == "kv_producer")


def test_engines_that_guess_different_numbers_of_tokens_are_paired_and_different_drafts_are_not(
    tmp_path: Path,
) -> None:
    config = engine_config(tmp_path / "m", "MooncakeConnector", "connectors", role="kv_producer")

    def fingerprint(method: str, tokens: int) -> Fingerprint:
        speculative = SimpleNamespace(method=method, num_speculative_tokens=tokens, draft_model_config=None)
        whole = SimpleNamespace(
            model_config=config.model_config, cache_config=config.cache_config, speculative_config=speculative
        )
        return fingerprint_of(whole, cache_config(), "A2")  # type: ignore[arg-type]

    assert mismatches(fingerprint("mtp", 1), fingerprint("mtp", 3)) == []
    assert [m.field for m in mismatches(fingerprint("mtp", 1), fingerprint("eagle", 1))] == ["speculative"]


def test_a_model_that_changes_its_own_configuration_keeps_its_fingerprint(tmp_path: Path) -> None:
    """As DeepSeek's does where it is built: in the worker, or in the scheduler's process too."""
    config = engine_config(tmp_path / "m", "MooncakeConnector", "connectors", role="kv_producer")
    config.speculative_config = None
    before = fingerprint_of(config, cache_config(), "A2")
    config.model_config.hf_config.rope_parameters = {"rope_type": "deepseek_yarn"}
    assert mismatches(before, fingerprint_of(config, cache_config(), "A2")) == []


def test_models_whose_files_differ_are_not_paired(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "m", "MooncakeConnector", "connectors", role="kv_producer")
    before = fingerprint_of(config, cache_config(), "A2")
    file = tmp_path / "m" / "config.json"
    file.write_text(file.read_text().replace("1024", "1025"))
    assert [m.field for m in mismatches(before, fingerprint_of(config, cache_config(), "A2"))] == [
        "model_config_hash"
    ]
    file.write_text(file.read_text().replace("1025", "1024"))
    config.model_config.hf_overrides = {"rope_theta": 1}
    assert [m.field for m in mismatches(before, fingerprint_of(config, cache_config(), "A2"))] == [
        "model_config_hash"
    ]
