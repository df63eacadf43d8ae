#!/usr/bin/env python
"""What pull and layer-wise expose of the transfer, what prefill hides of it, and what pushing costs prefill.

    python scripts/bench_overlap.py [--rounds 8]

Both pairs of engines run side by side and are asked in turn. Prefill's processes are pinned to the first core and
decode's to the last, since an engine that waits for its cache polls. "Exposed" is measured on P, from the end of
the prefill until D has answered the last message of the transfer: D's own step belongs to neither.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from connectors.sidechannel.client import SideChannelClient
from scripts.bench_support.engines import affinities, complete, engine, pin
from scripts.bench_support.side import story_when
from tests.e2e.cluster import Cluster, Role, cpu_spec, free_ports, running

LENGTHS = (512, 1024, 1900)
BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4


class Bench:
    """Two pairs of engines and a metaserver."""

    def __init__(self, directory: Path) -> None:
        self.front = Cluster(cpu_spec("layerwise"), directory / "front")
        self.front.roles = {"metaserver": self.front["metaserver"]}
        self.metaserver = self.front["metaserver"].url
        self.ports = free_ports(4)
        names = ("MooncakeConnector", "MooncakeLayerwiseConnector")
        self.roles: dict[str, Role] = {}
        for index, name in enumerate(names):
            for offset, role in enumerate(("kv_producer", "kv_consumer")):
                config = {
                    "kv_connector": name,
                    "kv_connector_module_path": "connectors",
                    "kv_role": role,
                    "kv_port": self.ports[2 * index + offset],
                    "engine_id": f"{name}-{role}",
                }
                self.roles[f"{index}{offset}"] = engine(f"{name}-{role}", directory, config)
        self.engines = Cluster.__new__(Cluster)
        self.engines.roles = {role.plan.name: role for role in self.roles.values()}
        self.client = SideChannelClient(b"", "bench")

    def pull(self, prompt: list[int]) -> dict[str, float]:
        """One pulled prompt: what P measured, in ms."""
        transfer_id = str(uuid.uuid4())
        params = {"do_remote_decode": True, "transfer_id": transfer_id}
        handoff = complete(self.roles["00"], prompt, params)["kv_transfer_params"]
        complete(self.roles["01"], prompt, handoff)
        return story_when(self.client, ("127.0.0.1", self.ports[0]), transfer_id, "exposed").timings_ms

    def push(self, prompt: list[int]) -> dict[str, float]:
        """One pushed prompt: what P measured, and P's whole time as `prefill`, in ms."""
        transfer_id = str(uuid.uuid4())
        base = {"transfer_id": transfer_id, "metaserver": self.metaserver}
        with ThreadPoolExecutor(1) as pool:
            decode = pool.submit(complete, self.roles["11"], prompt, {"do_remote_prefill": True, **base})
            time.sleep(0.2)  # D waits in both measurements of P's time
            started = time.perf_counter()
            complete(self.roles["10"], prompt, {"do_remote_decode": True, **base})
            prefill_ms = (time.perf_counter() - started) * 1e3
            decode.result()
        story = story_when(self.client, ("127.0.0.1", self.ports[2]), transfer_id, "exposed")
        return {**story.timings_ms, "prefill": prefill_ms}

    def no_push(self, prompt: list[int]) -> float:
        """P's whole time in ms without pushing, while the same D waits for a cache that comes afterwards."""
        transfer_id = str(uuid.uuid4())
        base = {"transfer_id": transfer_id, "metaserver": self.metaserver}
        with ThreadPoolExecutor(1) as pool:
            decode = pool.submit(complete, self.roles["11"], prompt, {"do_remote_prefill": True, **base})
            time.sleep(0.2)
            started = time.perf_counter()
            complete(self.roles["10"], prompt, None)
            prefill_ms = (time.perf_counter() - started) * 1e3
            complete(self.roles["10"], prompt, {"do_remote_decode": True, **base})
            decode.result()
        return prefill_ms


def copy_ms(length: int) -> float:
    """The same bytes copied inside one process."""
    source = np.ones(length * BYTES_PER_TOKEN, dtype=np.uint8)
    target = np.zeros_like(source)
    started = time.perf_counter()
    np.copyto(target, source)
    return (time.perf_counter() - started) * 1e3


def rows(bench: Bench, rounds: int) -> list[str]:
    values: dict[tuple[str, int], list[float]] = {}

    def note(name: str, length: int, value: float) -> None:
        values.setdefault((name, length), []).append(value)

    for turn in range(-1, rounds):
        for length in LENGTHS:
            prompt = random.Random(turn * 10_000 + length).choices(range(20, 49_000), k=length)
            pulled, pushed = bench.pull(prompt), bench.push(prompt)
            plain_ms = bench.no_push(prompt)
            if turn < 0:
                continue
            note("pull", length, pulled["exposed"])
            note("push", length, pushed["exposed"])
            note("ratio", length, pushed["exposed"] / pulled["exposed"])
            note("write", length, pushed["write"])
            note("hidden", length, 1 - min(1.0, pushed["exposed"] / pushed["write"]))
            note("cost", length, pushed["prefill"] / plain_ms)
            note("copy", length, copy_ms(length))
        print(f"  round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    found = []
    for length in LENGTHS:
        median = {name: statistics.median(values[name, length]) for name, n in values if n == length}
        found.append(
            f"| {length} | {length * BYTES_PER_TOKEN / 1e6:.0f} | {median['pull']:.0f} | {median['push']:.1f} "
            f"| {median['ratio']:.2f} | {median['write']:.0f} | {median['hidden']:.0%} | {median['copy']:.0f} "
            f"| {median['cost']:.3f} |"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch))
        with running(bench.front, bench.engines):
            for prefill, decode in (("00", "01"), ("10", "11")):
                pin([bench.roles[prefill]], {cores[0]})
                pin([bench.roles[decode]], {cores[-1]})
            table = rows(bench, rounds)
            for name, role in bench.roles.items():
                print(f"{role.plan.name} ({name}) on cores {' '.join(affinities([role]))}", file=sys.stderr)
        bench.client.close()
    print(
        "| prompt tokens | MB | pull exposes, ms | layer-wise exposes, ms | ratio | its writes take, ms | hidden "
        "| copy in a process, ms | prefill with push ÷ without |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
