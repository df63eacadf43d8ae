"""Tensor parallelism of its own on each side: what decode says is what one collocated engine says."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ascend_pd.embedded.model import default_model_dir, embedded_gguf, prepare_model
from ascend_pd.progress import Progress
from tests.e2e.cluster import Cluster, Role, collocated_spec, cpu_spec, running, wait_empty
from tests.e2e.load import Outcome, Prompt, ask, handoff_of, prompt_of
from tests.e2e.tiny_models import make_gqa_model

LENGTHS = (5, 128, 300, 700)
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


def oracle(spec: dict[str, Any], directory: Path, prompts: list[Prompt]) -> list[Outcome]:
    cluster = Cluster(spec, directory)
    del cluster.roles["proxy"]
    with running(cluster):
        return [ask(cluster["union/0"].url, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def gqa_oracle(gqa: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    prompts = [prompt_of(length, 40 + length) for length in LENGTHS]
    return oracle(collocated_spec(**model_at(gqa)), tmp_path_factory.mktemp("gqa-oracle"), prompts)


@pytest.fixture(scope="module", params=MODES)
def tp_cluster(
    request: pytest.FixtureRequest, gqa: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """One prefill pool with TP 2 that serves decode pools with TP 1 and TP 2."""
    document = cpu_spec(request.param, **model_at(gqa))
    prefill, decode = document["spec"]["pools"]
    other = dict(decode, name="decode2", port=decode["port"] + 1000, parallel={"tp": 2})
    document["spec"]["pools"] = [dict(prefill, parallel={"tp": 2}), decode, other]
    cluster = Cluster(document, tmp_path_factory.mktemp(f"tp-{request.param}"))
    del cluster.roles["proxy"]
    with running(cluster):
        yield cluster


@pytest.mark.parametrize("decode", ["decode/0", "decode2/0"])
def test_prefill_with_two_ranks_serves_decode_with_one_and_with_two(
    tp_cluster: Cluster, gqa_oracle: list[Outcome], decode: str
) -> None:
    for right in gqa_oracle:
        found = through(tp_cluster, tp_cluster[decode], right.prompt)
        assert found.tokens == right.tokens, f"{len(right.prompt)} tokens: {found.error or found.tokens}"
    moved = tp_cluster[decode].metrics()["vllm:external_prefix_cache_hits_total"]
    assert moved >= sum(LENGTHS) - len(LENGTHS)
    for role in ("prefill/0", decode):
        wait_empty(tp_cluster[role], 15.0)
