"""Real engines for tests: a cluster from a spec, each role guarded, with the means to hurt one of them."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ascend_pd.launch.front_command import cluster_plan
from ascend_pd.launch.guardian import descendants
from ascend_pd.launch.plan import ProcessPlan
from ascend_pd.launch.site import full_environment, require_embedded_model, this_site
from ascend_pd.spec.load import load_spec
from ascend_pd.spec.topology import derive_topology

ROOT = Path(__file__).resolve().parents[2]
READY_S = 420.0
PROGRESS_S = 15.0


_candidates = itertools.count(20_000 + (os.getpid() * 7) % 8_000)


def free_ports(count: int) -> list[int]:
    """Ports free at this moment, never given before, below the kernel's ephemeral range."""
    found: list[int] = []
    while len(found) < count:
        port = next(_candidates)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found


def merged(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `extra` laid over it, mapping by mapping."""
    result = dict(base)
    for key, value in extra.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def cpu_spec(mode: str, **spec: Any) -> dict[str, Any]:
    """One prefill and one decode engine with the embedded model, on free ports."""
    prefill, decode, kv, _, _, metaserver, proxy = free_ports(7)
    base = {
        "model": {"path": "smollm2", "servedName": "smollm2", "maxModelLen": 2048, "dtype": "float32"},
        "engine": {"blockSize": 128},
        "connector": {"mode": mode, "protocol": "tcp", "kvPort": kv},
        "pools": [
            {"name": "prefill", "role": "prefill", "hardware": "cpu", "port": prefill, "maxNumBatchedTokens": 512},
            {"name": "decode", "role": "decode", "hardware": "cpu", "port": decode, "maxNumBatchedTokens": 512},
        ],
        "proxy": {"host": "127.0.0.1", "port": proxy},
    }
    if mode == "layerwise":
        base["metaserver"] = {"host": "127.0.0.1", "port": metaserver}
    return {
        "apiVersion": "ascend-pd/v1",
        "kind": "PDCluster",
        "metadata": {"name": f"test-{mode}"},
        "spec": merged(base, spec),
    }


def collocated_spec(**spec: Any) -> dict[str, Any]:
    """One engine that does both, the oracle."""
    document = cpu_spec("pull", **spec)
    [port] = free_ports(1)
    document["spec"]["pools"] = [
        {"name": "union", "role": "union", "hardware": "cpu", "port": port, "maxNumBatchedTokens": 512}
    ]
    return document


@dataclass
class Role:
    """One process of a cluster under its guardian."""

    plan: ProcessPlan
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    guardian: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.plan.port}"

    def start(self) -> None:
        inherited = {**os.environ, "PYTHONPATH": str(ROOT), **self.env}
        # The lifeline ends the role when this process is gone, also when a killed pytest never gets to stop it.
        guardian = [sys.executable, "-m", "ascend_pd.launch.guardian", "--grace", "10", "--lifeline", "--"]
        with self.log.open("ab") as log:
            self.guardian = subprocess.Popen(
                [*guardian, *self.plan.argv],
                env=full_environment(self.plan, inherited),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def pids(self) -> list[int]:
        """The role's processes, the guardian left out."""
        return descendants(self.guardian.pid) if self.guardian else []

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every process of the role (not to its guardian)."""
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def stop(self) -> None:
        if self.guardian is None:
            return
        self.signal_all(signal.SIGCONT)
        self.guardian.terminate()
        try:
            self.guardian.wait(30)
        except subprocess.TimeoutExpired:
            self.guardian.kill()
            self.guardian.wait()
        self.guardian = None

    def kill(self) -> None:
        """kill -9 of everything but the guardian, which then ends as well."""
        self.signal_all(signal.SIGKILL)
        if self.guardian is not None:
            self.guardian.wait(30)
            self.guardian = None

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.plan.ready_path, timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def metrics(self) -> dict[str, float]:
        """The engine's plain gauges and counters, summed over labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.split("{", 1)[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found


class Cluster:
    """All roles of one spec."""

    def __init__(self, document: Mapping[str, Any], directory: Path, env: Mapping[str, str] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "cluster.yaml"
        path.write_text(yaml.safe_dump(dict(document)), encoding="utf-8")
        cluster = load_spec(path)
        site = this_site()
        require_embedded_model(cluster, site)
        plans = cluster_plan(cluster, derive_topology(cluster), site, path)
        self.roles = {
            plan.name: Role(plan, directory / f"{plan.name.replace('/', '-')}.log", env or {}) for plan in plans
        }

    def __getitem__(self, name: str) -> Role:
        return self.roles[name]

    @property
    def proxy(self) -> Role:
        return self.roles["proxy"]

    def start(self) -> None:
        for role in self.roles.values():
            role.start()

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until every role answers; a role that ends first fails at once, with the end of its log."""
        started = time.monotonic()
        said = started
        waiting = dict(self.roles)
        while waiting:
            waiting = {name: role for name, role in waiting.items() if not role.is_ready()}
            for name, role in waiting.items():
                if role.guardian is None or role.guardian.poll() is not None:
                    raise RuntimeError(f"{name} ended while starting:\n{tail(role.log)}")
            now = time.monotonic()
            if now - started > timeout_s:
                name, role = next(iter(waiting.items()))
                raise TimeoutError(f"{', '.join(waiting)} not ready after {timeout_s:.0f} s:\n{tail(role.log)}")
            if now - said > PROGRESS_S and waiting:
                said = now
                print(f"  {now - started:4.0f} s: waiting for {', '.join(waiting)}", file=sys.stderr, flush=True)
            time.sleep(0.3)

    def stop(self) -> None:
        for role in reversed(self.roles.values()):
            role.stop()


def without_proxy(document: Mapping[str, Any], directory: Path) -> Cluster:
    """A cluster whose engines are asked directly."""
    cluster = Cluster(document, directory)
    del cluster.roles["proxy"]
    return cluster


def tail(log: Path, lines: int = 40) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def running(*clusters: Cluster) -> Iterator[None]:
    """Start the clusters side by side; stop them whatever happens."""
    try:
        for cluster in clusters:
            cluster.start()
        for cluster in clusters:
            cluster.wait_ready()
        yield
    finally:
        for cluster in clusters:
            cluster.stop()


def wait_empty(role: Role, timeout_s: float) -> float:
    """Wait until the engine holds no block and waits on no request; returns the seconds it took.

    Raises:
        AssertionError: it still does at the end.
    """
    started = time.monotonic()
    while True:
        metrics = role.metrics()
        usage = metrics["vllm:kv_cache_usage_perc"]
        busy = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
        elapsed = time.monotonic() - started
        if usage == 0 and busy == 0:
            return elapsed
        assert elapsed < timeout_s, f"{role.plan.name} holds {usage:.2%} of its blocks, {busy:.0f} requests"
        time.sleep(0.2)
