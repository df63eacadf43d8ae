"""The five parts of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ascend_pd.launch.engine_command import kv_transfer_config
from ascend_pd.spec.cluster import Role
from ascend_pd.spec.load import load_spec
from ascend_pd.spec.topology import derive_topology
from ascend_pd.wire.environment import mooncake_environment
from scripts.validation import serving
from scripts.validation.report import Check, Part

ROOT = Path(__file__).resolve().parents[2]
CONTRACT_S, TRANSPORT_S, CHECK_S = 1800, 900, 600


@dataclass
class Site:
    """What is validated, and where."""

    spec: Path
    device: str
    pool: str = ""
    ready_s: float = 900.0
    pd_url: str = ""
    collocated_url: str = ""
    logs: Path = Path("logs/validation")
    dies: tuple[int, int] = (0, 1)
    answers: list[serving.Answers] = field(default_factory=list)
    """P/D's and the one engine's, asked once for two parts."""
    failure: str = ""
    """Why there are none: what did not start is not started again."""

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = yaml.safe_load(self.spec.read_text(encoding="utf-8"))
        return document


def preflight(part: Part, site: Site) -> None:
    """`ascend-pd check --depth host`: warnings are recorded, errors fail."""
    pool = ["--pool", site.pool] if site.pool else []
    done = _python(
        ["-m", "ascend_pd", "check", str(site.spec), "--depth", "host", "--format", "json", *pool], CHECK_S
    )
    try:
        report = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip()) from None
    part.facts = {"image": report["clusters"][0]["image"], "findings": report["findings"]}
    errors = [f for f in report["findings"] if f["severity"] == "error"]
    text = "\n".join(f"{f['path']}: {f['message']} - {f['fix']}" for f in errors)
    part.checks.append(Check("no errors", report["ok"], text, {"findings": len(report["findings"])}))


def contract(part: Part, site: Site) -> None:
    """The list of names: against what is installed on NPU, against the released packages elsewhere."""
    installed = {"ASCEND_PD_CONTRACT": "installed"} if site.device == "npu" else {}
    done = _python(["-m", "pytest", "tests/contract", "-q", "-p", "no:cacheprovider"], CONTRACT_S, installed)
    summary = done.stdout.strip().splitlines()[-1:] or [done.stderr.strip()[-300:]]
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    part.facts = {"summary": summary[0]}
    part.checks.append(Check("all names are there", done.returncode == 0, "\n".join(failed) or summary[0]))


def transport(part: Part, site: Site) -> None:
    """The cluster's transport between two processes on two dies of this machine."""
    cluster = load_spec(site.spec)
    topology = derive_topology(cluster)
    replica = next(replica for replica in topology.replicas if replica.role is not Role.UNION)
    transfer = kv_transfer_config(cluster, topology, replica, replica.engines[0])
    config = transfer["kv_connector_extra_config"] if transfer else {}
    config = {key: config[key] for key in ("transport", "protocol", "memfabric_store") if key in config}
    hardware = "cpu" if site.device == "cpu" else replica.hardware.value
    host = os.environ.get(
        "ASCEND_PD_VALIDATE_HOST", "127.0.0.1" if site.device == "cpu" else replica.engines[0].host
    )
    arguments = [hardware, *map(str, site.dies), json.dumps({**config, "host": host, "hardware": hardware})]
    done = _python(
        ["-m", "scripts.validation.transport_part", *arguments],
        TRANSPORT_S,
        mooncake_environment(config["protocol"]),
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("part ")), None)
    if line is None:
        raise RuntimeError(f"the transport process gave no result:\n{done.stderr.strip()[-3000:]}")
    found = json.loads(line.removeprefix("part "))
    part.facts = found["facts"]
    part.checks += [Check(**check) for check in found["checks"]]


def equality(part: Part, site: Site) -> None:
    """Greedy text through P and D against one engine's."""
    serving.compare_text(part, *_answers(site))


def benchmark(part: Part, site: Site) -> None:
    """Time to the first token, both in this run."""
    serving.compare_times(part, *_answers(site))


PARTS: dict[str, Callable[[Part, Site], None]] = {
    "preflight": preflight,
    "contract": contract,
    "transport": transport,
    "equality": equality,
    "benchmark": benchmark,
}


def _answers(site: Site) -> tuple[serving.Answers, serving.Answers]:
    """P/D's and one engine's, one after the other on the same devices; started by the first part that asks."""
    if site.failure:
        raise RuntimeError(f"not run, for the part before it failed: {site.failure}")
    if not site.answers:
        site.failure = "the services could not be asked"
        document = site.document
        model = document["spec"]["model"].get("servedName") or document["spec"]["model"]["path"]
        longest = serving.max_prompt(document)
        with tempfile.TemporaryDirectory() as scratch:
            alone = serving.write_document(serving.union_document(document), Path(scratch) / "collocated.yaml")
            found = []
            for name, spec, url in (("pd", site.spec, site.pd_url), ("collocated", alone, site.collocated_url)):
                if url:
                    found.append(serving.ask(url, model, longest, with_times=True))
                    continue
                with serving.started(spec, site.logs / name, site.ready_s) as proxy:
                    found.append(serving.ask(proxy, model, longest, with_times=True))
        site.answers, site.failure = found, ""
    disaggregated, collocated = site.answers
    return disaggregated, collocated


def _python(
    arguments: list[str], limit_s: float, extra: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, **(extra or {}), "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s
    )
