"""Start what a cluster file describes, ask it, and compare two such services: text and time to the first token."""

from __future__ import annotations

import copy
import json
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ascend_pd.spec.load import load_spec
from ascend_pd.spec.topology import derive_topology
from scripts.validation.report import Part

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 90.0
REQUEST_S = 300.0
LENGTHS = (1, 127, 128, 129, 513, 1500)
MAX_TOKENS = 12
BENCH_LENGTHS = (128, 1024, 4096, 16384)
REPEATS = 3
TOKENS = (20, 20000)
"""Token ids that every model's vocabulary has and that are no special ones."""


@dataclass
class Answers:
    """What one service gave."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Prompt length → generated token ids."""
    first_token_ms: dict[int, float] = field(default_factory=dict)
    """Prompt length → median time to the first token."""


def union_document(document: dict[str, Any]) -> dict[str, Any]:
    """The same cluster with one engine that does both: decode's parallel layout, no prefill pool."""
    result = copy.deepcopy(document)
    pools = result["spec"]["pools"]
    decode = next(pool for pool in pools if pool["role"] == "decode")
    decode.update(name="collocated", role="union", replicas=1)
    result["spec"]["pools"] = [decode]
    result["spec"].setdefault("connector", {})["mode"] = "pull"
    result["spec"].pop("metaserver", None)
    result["metadata"]["name"] += "-collocated"
    return result


def max_prompt(document: dict[str, Any]) -> int:
    """The longest prompt that leaves room for an answer."""
    return int(document["spec"]["model"].get("maxModelLen") or 2048) - MAX_TOKENS - 1


@contextmanager
def started(spec: Path, logs: Path, ready_s: float) -> Iterator[str]:
    """The cluster of a file on this machine; gives the proxy's address.

    Raises:
        RuntimeError: it did not become ready, with the end of what it said.
    """
    command = [sys.executable, "-m", "ascend_pd", "up", str(spec), "--log-dir", str(logs)]
    logs.mkdir(parents=True, exist_ok=True)
    said = logs / "up.log"
    with said.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--ready-timeout", str(int(ready_s))], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + ready_s + 30
        while "all ready" not in said.read_text(encoding="utf-8", errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = said.read_text(encoding="utf-8", errors="replace")[-3000:]
                raise RuntimeError(f"ascend-pd up {spec.name} did not become ready:\n{tail}")
            time.sleep(0.5)
        yield derive_topology(load_spec(spec)).proxy.url
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def prompt(length: int, seed: int) -> list[int]:
    """Random ordinary tokens."""
    return random.Random(seed * 100_003 + length).choices(range(*TOKENS), k=length)


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=REQUEST_S)


def generated(url: str, model: str, tokens: list[int]) -> list[int]:
    """The greedy continuation."""
    body = {
        "model": model,
        "prompt": tokens,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with post(url, body) as answer:
        found: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return found


def first_token_ms(url: str, model: str, tokens: list[int]) -> float:
    """From the request to the first event that has text."""
    body = {
        "model": model,
        "prompt": tokens,
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
    }
    started_at = time.monotonic()
    with post(url, body) as answer:
        for raw in answer:
            if raw.startswith(b"data: {"):
                event = json.loads(raw[6:])
                if "error" in event:
                    raise RuntimeError(f"the service answered {event['error']}")
                return (time.monotonic() - started_at) * 1e3
    raise RuntimeError("the stream ended without an event")


def ask(url: str, model: str, longest: int, with_times: bool) -> Answers:
    """All prompts of one service."""
    answers = Answers()
    for length in (n for n in LENGTHS if n <= longest):
        answers.tokens[length] = generated(url, model, prompt(length, 0))
    for length in (n for n in BENCH_LENGTHS if with_times and n <= longest):
        times = [first_token_ms(url, model, prompt(length, 1 + i)) for i in range(REPEATS)]
        answers.first_token_ms[length] = round(statistics.median(times), 1)
    return answers


def compare_text(part: Part, disaggregated: Answers, collocated: Answers) -> None:
    """Token for token, one check per prompt."""
    for length, wanted in collocated.tokens.items():
        with part.check(f"{length} prompt tokens") as check:
            found = disaggregated.tokens[length]
            agree = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(wanted))
            check.figures = {"equal": agree, "of": len(wanted)}
            if found != wanted:
                raise ValueError(f"P/D gave {found}, one engine {wanted}")


def compare_times(part: Part, disaggregated: Answers, collocated: Answers) -> None:
    """Recorded, not judged: the ratio of the same run."""
    for length, alone in collocated.first_token_ms.items():
        with part.check(f"first token after {length} prompt tokens") as check:
            pair = disaggregated.first_token_ms[length]
            check.figures = {"pd_ms": pair, "one_engine_ms": alone, "ratio": round(pair / alone, 3)}


def write_document(document: dict[str, Any], path: Path) -> Path:
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path
