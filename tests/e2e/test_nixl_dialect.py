"""The proxy in front of upstream's own P/D: two engines with NixlConnector, nothing of ours in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ascend_pd.launch.front_command import FRONT_ENV
from ascend_pd.launch.plan import Kind, ProcessPlan
from tests.e2e.cluster import Cluster, Role, cpu_spec, free_ports, running, wait_empty, without_proxy
from tests.e2e.load import Prompt, ask, ask_and_leave, prompt_of

PROMPTS: list[Prompt] = [prompt_of(length, 800 + length) for length in (5, 128, 300)]


def nixl(role: str) -> dict[str, Any]:
    """What makes an engine without a connector one with upstream's."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    [port] = free_ports(1)
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "UCX_TLS": "tcp"}
    return {"role": "union", "extraArgs": ["--kv-transfer-config", json.dumps(transfer)], "env": env}


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory: Path = tmp_path_factory.mktemp("nixl")
    document = cpu_spec("pull")
    prefill, decode = document["spec"]["pools"]
    document["spec"]["pools"] = [{**prefill, **nixl("kv_producer")}, {**decode, **nixl("kv_consumer")}]
    cluster = without_proxy(document, directory)
    [port] = free_ports(1)
    engines = [f"--{name}={cluster[f'{name}/0'].url},dialect=nixl" for name in ("prefill", "decode")]
    plan = ProcessPlan(
        name="proxy",
        kind=Kind.PROXY,
        argv=(sys.executable, "-m", "proxy", "--port", str(port), *engines),
        env=FRONT_ENV,
        host="127.0.0.1",
        port=port,
        ready_path="/ready",
        ports=(port,),
    )
    cluster.roles["proxy"] = Role(plan, directory / "proxy.log")
    with running(cluster):
        yield cluster


def test_answers_equal_the_collocated_engines_and_the_cache_came_over(upstream: Cluster, collocated: str) -> None:
    for prompt in PROMPTS:
        found, right = ask(upstream.proxy.url, prompt), ask(collocated, prompt)
        assert found.tokens == right.tokens, f"{len(prompt)} tokens: {found.error or found.tokens}"
    hits = upstream["decode/0"].metrics()["vllm:external_prefix_cache_hits_total"]
    assert hits >= sum(len(prompt) - 1 for prompt in PROMPTS if len(prompt) > 128), hits


def test_a_client_that_leaves_strands_nothing(upstream: Cluster) -> None:
    for after_s, stream in ((0.3, True), (1.0, False), (2.0, True)):
        ask_and_leave(upstream.proxy.url, PROMPTS[-1], after_s, stream=stream)
    assert ask(upstream.proxy.url, PROMPTS[1]).answered
    wait_empty(upstream["decode/0"], 30.0)
