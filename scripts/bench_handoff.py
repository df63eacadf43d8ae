#!/usr/bin/env python
"""From P's answer to D's first token: our pull against vLLM's NixlConnector, over TCP and by default, and a floor.

    python3.11 scripts/setup_env.py --test
    python scripts/bench_handoff.py [--rounds 12]

Our engines and the floor are asked in turn with one peer after the other, prompt by prompt, so that a slow moment of
the machine hits all alike (five engines fit in 16 GB, all seven do not). Engines that are not being asked are stopped
(SIGSTOP): an idle Nixl worker burns a core. Every thread of every engine gets the same cores (Nixl's workers would
pin themselves to the last one).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_support.engines import affinities, complete, engine, first_token_s, pin
from tests.e2e.cluster import Cluster, Role, free_ports, running

LENGTHS = (256, 1024, 1900)
BYTES_PER_BLOCK = 30 * 196_608
SETTLE_S = 0.5
"""After going on: what timers of stopped processes have to catch up with is over."""


@dataclass
class System:
    """One way to hand off: a prefill engine (none for the floor), a decode engine, and P's parameters."""

    name: str
    prefill: Role | None
    decode: Role
    params: Callable[[], dict[str, Any]]

    @property
    def roles(self) -> list[Role]:
        """Its engines, prefill first."""
        return [role for role in (self.prefill, self.decode) if role]

    def measure_alone(self, prompt: list[int]) -> float:
        """As `measure`, of engines that are otherwise stopped."""
        signal_all(self.roles, signal.SIGCONT)
        try:
            time.sleep(SETTLE_S)
            return self.measure(prompt)
        finally:
            signal_all(self.roles, signal.SIGSTOP)

    def measure(self, prompt: list[int]) -> float:
        """Milliseconds from P's answer to D's first token."""
        params: dict[str, Any] = self.params()
        if self.prefill is not None:
            params = complete(self.prefill, prompt, params)["kv_transfer_params"]
        return first_token_s(self.decode, prompt, params) * 1e3


class Engines(Cluster):
    """The benchmark's roles under one start and stop."""

    def __init__(self, roles: list[Role]) -> None:
        self.roles = {role.plan.name: role for role in roles}


def ours(directory: Path) -> System:
    ports = free_ports(2)
    mooncake = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535", "MC_TCP_STATUS_TIMEOUT_SEC": "4"}
    mooncake |= {"MC_TCP_PROGRESS_TIMEOUT_SEC": "4", "MC_TRANSFER_TIMEOUT": "15"}
    roles = []
    for port, role in zip(ports, ("kv_producer", "kv_consumer"), strict=True):
        config = {"kv_connector": "MooncakeConnector", "kv_connector_module_path": "connectors", "kv_role": role}
        roles.append(engine(f"ours-{role}", directory, {**config, "kv_port": port, "engine_id": role}, mooncake))
    return System(
        "ascend-pd, Mooncake TCP",
        roles[0],
        roles[1],
        lambda: {"do_remote_decode": True, "transfer_id": str(uuid.uuid4())},
    )


def nixl(directory: Path, name: str, env: dict[str, str]) -> System:
    roles = []
    for port, role in zip(free_ports(2), ("kv_producer", "kv_consumer"), strict=True):
        config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        roles.append(engine(f"{name.split()[-1]}-{role}", directory, config, {**side, **env}))
    request = {"do_remote_decode": True, "do_remote_prefill": False}
    return System(name, roles[0], roles[1], lambda: dict(request))


def floor(directory: Path) -> System:
    config = {
        "kv_connector": "FreeCopyConnector",
        "kv_connector_module_path": "scripts.bench_support.free_copy",
        "kv_role": "kv_consumer",
    }
    return System(FLOOR, None, engine("floor", directory, config), lambda: {"free_copy": True})


FLOOR = "copy inside D (floor)"


def roles_of(systems: list[System]) -> list[Role]:
    """Their engines, prefill first."""
    return [role for system in systems for role in system.roles]


def signal_all(roles: list[Role], number: signal.Signals) -> None:
    """Send a signal to every process of every role."""
    for role in roles:
        role.signal_all(number)


def measure(systems: list[System], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Milliseconds per (system, prompt length), one value a round."""
    found: dict[tuple[str, int], list[float]] = {}
    signal_all(roles_of(systems), signal.SIGSTOP)
    for turn in range(-2, rounds):  # two rounds to warm up
        for length in LENGTHS:
            prompt = random.Random(turn * 10_000 + length).choices(range(20, 49_000), k=length)
            for system in systems:
                value = system.measure_alone(prompt)
                if turn >= 0:
                    found.setdefault((system.name, length), []).append(value)
        print(f"  round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    signal_all(roles_of(systems), signal.SIGCONT)
    return found


def table(found: dict[tuple[str, int], list[float]], systems: list[System]) -> str:
    """Rows: medians in ms, each with our time divided by it in the same rounds (below 1: we are faster)."""
    lines = []
    for system in systems:
        cells = []
        for length in LENGTHS:
            values, reference = found[system.name, length], found[systems[0].name, length]
            ratio = statistics.median(mine / theirs for mine, theirs in zip(reference, values, strict=True))
            cells.append(f"{statistics.median(values):.0f} ms, {ratio:.2f}")
        lines.append("| " + " | ".join([system.name, *cells]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    if importlib.util.find_spec("nixl") is None:
        print("nixl is not there: python3.11 scripts/setup_env.py --test", file=sys.stderr)
        return 1
    cores = os.sched_getaffinity(0)
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        own, least = ours(directory), floor(directory)
        with running(Engines(roles_of([own, least]))):
            for name, env in (("NixlConnector, UCX_TLS=tcp", {"UCX_TLS": "tcp"}), ("NixlConnector, default", {})):
                peer = nixl(directory, name, env)
                systems = [own, peer, least]
                with running(Engines(roles_of([peer]))):
                    pin(roles_of(systems), cores)
                    lines.append(table(measure(systems, rounds), systems))
                    used = " and ".join(sorted(affinities(roles_of(systems))))
                    print(f"  {name}: cores of all threads {used}", file=sys.stderr)
    head = ["system", *(f"{n} tokens ({-(-n // 128) * BYTES_PER_BLOCK / 1e6:.0f} MB)" for n in LENGTHS)]
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
