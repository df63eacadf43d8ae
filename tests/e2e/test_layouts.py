"""Tensor parallelism of its own on each side, and MLA: what decode says is what it says alone."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ascend_pd.embedded.model import default_model_dir, embedded_gguf, prepare_model
from ascend_pd.progress import Progress
from tests.e2e.cluster import Cluster, Role, cpu_spec, running, wait_empty, without_proxy
from tests.e2e.load import Outcome, Prompt, ask, handoff_of, prompt_of
from tests.e2e.tiny_models import make_gqa_model, make_mla_model

GQA_PROMPTS = [prompt_of(length, 40 + length) for length in (2, 5, 127, 128, 129, 300, 700)]
MLA_PROMPTS = [prompt_of(length, 90 + length) for length in (3, 15, 16, 17, 100, 500)]
MODES = ("pull", "layerwise")


def model_at(path: Path, **engine: Any) -> dict[str, Any]:
    model = {"path": str(path), "servedName": "smollm2", "maxModelLen": 1024, "dtype": "float32"}
    return {"model": model, "engine": engine} if engine else {"model": model}


def made(make: Callable[[Path], Path], directory: Path) -> Path:
    with Progress("model") as progress:
        prepare_model(embedded_gguf(), default_model_dir(), progress)
    return make(directory)


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(make_gqa_model, tmp_path_factory.mktemp("models") / "gqa")


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(make_mla_model, tmp_path_factory.mktemp("models") / "mla")


def in_one_chunk(document: dict[str, Any]) -> dict[str, Any]:
    """vLLM's CPU MLA has no chunked prefill."""
    for pool in document["spec"]["pools"]:
        pool["maxNumBatchedTokens"] = 1024
    return document


def expected_of(decode: Role, prompts: list[Prompt]) -> list[Outcome]:
    """What the same engine answers when it computes the prompts by itself, and shares nothing with what came over."""
    found = [ask(decode.url, prompt, cache_salt="by itself") for prompt in prompts]
    assert all(outcome.answered for outcome in found), [outcome.error for outcome in found]
    return found


def through(cluster: Cluster, decode: Role, prompt: Prompt) -> Outcome:
    """Both legs by hand, so that the test chooses the decode engine."""
    transfer = {"transfer_id": str(uuid.uuid4())}
    prefill = cluster["prefill/0"]
    if "metaserver" not in cluster.roles:
        handoff = handoff_of(prefill.url, prompt, {"do_remote_decode": True, **transfer})
        return ask(decode.url, prompt, params=handoff)
    transfer["metaserver"] = cluster["metaserver"].url
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, decode.url, prompt, params={"do_remote_prefill": True, **transfer})
        ask(prefill.url, prompt, params={"do_remote_decode": True, **transfer}, max_tokens=1)
        return answer.result()


def all_arrive(cluster: Cluster, decode: str, expected: list[Outcome]) -> None:
    """Equal tokens, from a cache that came over the wire (but for its last token), and nothing left behind."""
    before = cluster[decode].metrics().get("vllm:external_prefix_cache_hits_total", 0.0)
    for right in expected:
        assert right.answered, right.error
        found = through(cluster, cluster[decode], right.prompt)
        assert found.tokens == right.tokens, f"{len(right.prompt)} tokens: {found.error or found.tokens}"
    moved = cluster[decode].metrics()["vllm:external_prefix_cache_hits_total"] - before
    assert moved >= sum(len(right.prompt) - 1 for right in expected)
    for role in ("prefill/0", decode):
        wait_empty(cluster[role], 15.0)


@pytest.fixture(scope="module", params=MODES)
def tp_cluster(
    request: pytest.FixtureRequest,
    gqa: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """One prefill pool with TP 2 that serves decode pools with TP 1 and TP 2, every transfer compared on both ends.

    The first read of `decode/0` (pull), or the first write of each rank of prefill, gets one byte wrong on the wire.
    """
    document = cpu_spec(request.param, connector={"checksum": True}, **model_at(gqa))
    prefill, decode = document["spec"]["pools"]
    other = dict(decode, name="decode2", port=decode["port"] + 1000, parallel={"tp": 2})
    document["spec"]["pools"] = [dict(prefill, parallel={"tp": 2}), decode, other]
    cluster = without_proxy(document, tmp_path_factory.mktemp(f"tp-{request.param}"))
    who_moves = "decode/0" if request.param == "pull" else "prefill/0"
    cluster[who_moves].env = {"ASCEND_PD_FAULTS": "corrupt-byte:1"}
    with running(cluster):
        damaged = through(cluster, cluster["decode/0"], prompt_of(300, 4))
        assert not damaged.answered, "nobody saw the wrong byte"
        yield cluster


def test_a_byte_changed_on_the_wire_is_seen_and_named(tp_cluster: Cluster) -> None:
    logs = "".join(tp_cluster[name].log.read_text(errors="replace") for name in ("prefill/0", "decode/0"))
    assert re.search(r"checksum: layers \d+-\d+ of tokens 0-\d+ are not received as they were sent", logs)
    for role in ("prefill/0", "decode/0"):
        wait_empty(tp_cluster[role], 15.0)


@pytest.mark.parametrize("decode", ["decode/0", "decode2/0"])
def test_prefill_with_two_ranks_serves_decode_with_one_and_with_two(tp_cluster: Cluster, decode: str) -> None:
    all_arrive(tp_cluster, decode, expected_of(tp_cluster["decode/0"], GQA_PROMPTS))


@pytest.mark.parametrize("mode", MODES)
def test_latent_cache_of_mla_arrives(mode: str, mla: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    document = in_one_chunk(cpu_spec(mode, **model_at(mla, blockSize=16)))
    cluster = without_proxy(document, tmp_path_factory.mktemp(f"mla-{mode}"))
    with running(cluster):
        all_arrive(cluster, "decode/0", expected_of(cluster["decode/0"], MLA_PROMPTS))
