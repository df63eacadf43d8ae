"""Engines for benchmarks: started side by side, pinned alike, spoken to without a proxy."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ascend_pd.launch.plan import Kind, ProcessPlan
from ascend_pd.launch.site import this_site
from tests.e2e.cluster import Role, free_ports

ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOG_minloglevel": "2",
}
_CACHE_BYTES = 260 << 20


def engine(
    name: str,
    directory: Path,
    transfer: Mapping[str, Any] | None,
    env: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
) -> Role:
    """One engine with the embedded model, a cache of 260 MiB and no prefix cache."""
    [port] = free_ports(1)
    site = this_site()
    arguments = ["--model", site.model_dir, "--served-model-name", "smollm2", "--host", "127.0.0.1"]
    arguments += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    arguments += ["--block-size", "128", "--max-num-batched-tokens", "512", "--no-enable-prefix-caching"]
    arguments += ["--kv-cache-memory-bytes", str(_CACHE_BYTES), *extra]
    if transfer is not None:
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    plan = ProcessPlan(
        name=name,
        kind=Kind.ENGINE,
        argv=(site.python, "-m", "vllm.entrypoints.openai.api_server", *arguments),
        env={**ENGINE_ENV, **(env or {})},
        host="127.0.0.1",
        port=port,
        ports=(port,),
    )
    return Role(plan, directory / f"{name}.log")


def pin(roles: Iterable[Role], cores: set[int]) -> None:
    """Give every thread of every process the same cores. NixlConnector pins its workers to one by itself."""
    for role in roles:
        for pid in role.pids():
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    os.sched_setaffinity(int(thread.name), cores)
                except ProcessLookupError:
                    continue


def affinities(roles: Iterable[Role]) -> set[str]:
    """The core sets in use among all threads of the roles."""
    found: set[str] = set()
    for role in roles:
        for pid in role.pids():
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    found.add(",".join(map(str, sorted(os.sched_getaffinity(int(thread.name))))))
                except ProcessLookupError:
                    continue
    return found


def complete(role: Role, prompt: Sequence[int], params: Mapping[str, Any] | None, max_tokens: int = 1) -> Any:
    """One completion, not streamed."""
    connection = http.client.HTTPConnection("127.0.0.1", role.plan.port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", _body(prompt, params, max_tokens, stream=False), _JSON)
        answer = connection.getresponse()
        document = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"{role.plan.name}: HTTP {answer.status}: {document}")
        return document
    finally:
        connection.close()


def first_token_s(role: Role, prompt: Sequence[int], params: Mapping[str, Any] | None) -> float:
    """Seconds from sending a streamed request to its first event with a token; the stream is read to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", role.plan.port, timeout=120)
    started = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", _body(prompt, params, 2, stream=True), _JSON)
        answer = connection.getresponse()
        first = 0.0
        while line := answer.readline():
            if line.startswith(b"data: {"):
                if b'"error"' in line:
                    raise RuntimeError(f"{role.plan.name}: {line.decode()}")
                first = first or time.perf_counter() - started
        if not first:
            raise RuntimeError(f"{role.plan.name}: HTTP {answer.status}, no token")
        return first
    finally:
        connection.close()


_JSON = {"content-type": "application/json"}


def _body(prompt: Sequence[int], params: Mapping[str, Any] | None, max_tokens: int, *, stream: bool) -> str:
    body: dict[str, Any] = {"model": "smollm2", "prompt": list(prompt), "max_tokens": max_tokens}
    body |= {"temperature": 0, "stream": stream, "ignore_eos": True}
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    return json.dumps(body)
