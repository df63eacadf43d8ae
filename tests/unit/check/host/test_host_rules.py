"""Host rules that need no NPU: ports, model, disks, clock, Mooncake, foreign packages. And the tool runner."""

from __future__ import annotations

import json
import socket
import time
from functools import partial
from pathlib import Path

import pytest

from ascend_pd.check.host import judge
from ascend_pd.check.host.facts import MOONCAKE_IMPORT, CommandFacts, HostFacts, PackageFacts, PortFacts
from ascend_pd.check.host.gather import Probe, gather
from ascend_pd.check.host.judge import judge_host
from ascend_pd.check.host.rules.ports import reserved
from ascend_pd.check.host.runner import run_tool
from ascend_pd.check.judge import subject_of
from ascend_pd.check.subject import Subject
from ascend_pd.cli import main
from ascend_pd.spec.parse import parse_spec
from tests.unit.spec.texts import cluster_data, pool, text_of

RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
KEPT = "/proc/sys/net/ipv4/ip_local_reserved_ports"


def cpu(**spec: object) -> Subject:
    return subject_of(parse_spec(text_of(cluster_data(**spec))).cluster)


def judged(rule: str, **facts: object) -> list[tuple[str, str, str]]:
    seen = HostFacts(hostname="h", pool="prefill", **facts)  # type: ignore[arg-type]
    found = judge_host(cpu(), seen)
    assert all(f.path == "host:h" for f in found)
    return [(f.severity.value, f.message, f.fix) for f in found if f.rule == rule]


def test_a_port_in_use_is_found_by_binding_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        data = cluster_data(pool("prefill", "prefill", port), pool("decode", "decode", 1024))
        cluster = subject_of(parse_spec(text_of(data)).cluster)
        facts = gather(cluster, cluster.topology.replicas[0], Probe(root=tmp_path, python="true"))
    messages = [f.message for f in judge_host(cluster, facts) if f.rule == "host-ports"]
    assert f"HTTP of prefill/0: port {port} cannot be bound: Address already in use" in messages


def test_ports_in_the_ephemeral_range_are_told_unless_reserved() -> None:
    ports = tuple(PortFacts(p, "x", "$.x") for p in (8100, 36000, 36001))
    assert judged("host-ports", ports=ports, files={RANGE: "32768 60999\n", KEPT: "\n"}) == [
        (
            "warning",
            "2 ports (36000-36001) are in the ephemeral range 32768-60999",
            "sysctl -w net.ipv4.ip_local_reserved_ports=36000-36001",
        )
    ]
    assert judged("host-ports", ports=ports, files={RANGE: "32768 60999\n", KEPT: "36000-36063\n"}) == []
    assert judged("host-ports", ports=ports)[0][0] == "unknown"


def test_reserved_ports_are_read_as_the_kernel_prints_them() -> None:
    assert reserved("8080,36000-36002\n") == [range(8080, 8081), range(36000, 36003)]
    assert reserved("\n") == []


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (None, "no such directory"),
        ({}, "no readable config.json"),
        ({"config.json": "{}"}, "no weights (*.safetensors)"),
        (
            {
                "config.json": "{}",
                "a.safetensors": "",
                "model.safetensors.index.json": json.dumps(
                    {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
                ),
            },
            "1 of 2 weight files are missing, b.safetensors among them",
        ),
        ({"config.json": "{}", "a.safetensors": ""}, ""),
    ],
)
def test_a_model_directory_is_complete_or_says_what_lacks(
    tmp_path: Path, files: dict[str, str] | None, problem: str
) -> None:
    directory = tmp_path / "model"
    if files is not None:
        directory.mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
    cluster = cpu(model={"path": str(directory), "maxModelLen": 2048})
    facts = gather(cluster, cluster.topology.replicas[0], Probe(root=tmp_path, python="true"))
    messages = [f.message for f in judge_host(cluster, facts) if f.rule == "host-model"]
    assert messages == ([f"{directory}: {problem}"] if problem else [])


def test_full_disks_are_a_warning() -> None:
    assert judged("host-memory", disk_used_percent={"/": 91.0, "/tmp": 10.0}, shm_bytes=1 << 36) == [
        ("warning", "/ is 91 % full", "clean up, or use another disk")
    ]
    assert judged("host-memory")[0][0] == "unknown"


@pytest.mark.parametrize(("answer", "severity"), [("no\n", "warning"), ("", "unknown"), ("yes\n", None)])
def test_a_clock_that_nobody_keeps_is_a_warning(answer: str, severity: str | None) -> None:
    found = judged("host-clock", commands={"timedatectl": CommandFacts("ran", 0, answer)})
    assert [f[0] for f in found] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("output", "message", "fix"),
    [
        (
            "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory",
            "Mooncake needs libibverbs.so.1, which is missing",
            "apt-get install libibverbs1",
        ),
        (
            "ImportError: libcudart.so.12: cannot open shared object file",
            "Mooncake needs libcudart.so.12, which is missing",
            "install what has libcudart.so.12",
        ),
        (
            "ModuleNotFoundError: No module named 'mooncake'",
            "Mooncake is not installed",
            "pip install mooncake-transfer-engine-non-cuda",
        ),
    ],
)
def test_a_mooncake_that_does_not_load_names_the_package_to_install(output: str, message: str, fix: str) -> None:
    commands = {MOONCAKE_IMPORT: CommandFacts("ran", 1, f"Traceback\n{output}\n")}
    assert judged("host-mooncake", commands=commands) == [("error", message, fix)]
    assert judged("host-mooncake", commands={MOONCAKE_IMPORT: CommandFacts("ran", 0, "")}) == []


def test_a_foreign_package_of_our_name_is_found() -> None:
    foreign = PackageFacts("/usr/lib/python3/dist-packages/proxy", "/opt/ours/proxy")
    assert judged("host-shadow", shadows={"proxy": foreign, "connectors": PackageFacts("/x", "/x")}) == [
        (
            "error",
            "import proxy finds /usr/lib/python3/dist-packages/proxy, ours is /opt/ours/proxy",
            "uninstall what provides /usr/lib/python3/dist-packages/proxy",
        )
    ]


def executable(directory: Path, text: str) -> str:
    path = directory / "hccn_tool"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return f"{directory}:/bin:/usr/bin"


def test_a_tool_that_hangs_is_stopped_and_said_to_have_timed_out(tmp_path: Path) -> None:
    started = time.monotonic()
    result = run_tool(["hccn_tool"], executable(tmp_path, "exec sleep 60"), limit_s=0.2)
    assert result.state == "timeout"
    assert time.monotonic() - started < 30


def test_a_busy_tool_is_asked_again(tmp_path: Path) -> None:
    script = f'if [ -f {tmp_path}/once ]; then echo "link status: UP"; else touch {tmp_path}/once; '
    script += 'echo "hccn_tool is busy, please try again"; fi'
    assert run_tool(["hccn_tool"], executable(tmp_path, script)).output == "link status: UP\n"


def test_a_tool_that_is_not_there_is_missing(tmp_path: Path) -> None:
    assert run_tool(["hccn_tool"], str(tmp_path)).state == "missing"


def test_the_command_saves_facts_and_judges_them_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(tmp_path, "echo ModuleNotFoundError: no such module; exit 1")  # what vLLM says takes seconds to ask
    monkeypatch.setattr(judge, "Probe", partial(Probe, python=str(tmp_path / "hccn_tool")))
    spec, facts = tmp_path / "c.yaml", tmp_path / "facts.json"
    spec.write_text(text_of(cluster_data(connector={"protocol": "tcp", "transport": "mooncake"})))
    first = main(["check", str(spec), "--depth", "host", "--pool", "decode", "--save-facts", str(facts)])
    told = capsys.readouterr().out
    assert "ModuleNotFoundError: no such module" in told
    assert main(["check", str(spec), "--facts", str(facts)]) == first
    assert capsys.readouterr().out == told
    assert json.loads(facts.read_text())["pool"] == "decode"


def test_a_pool_that_is_not_there_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "c.yaml"
    spec.write_text(text_of(cluster_data()))
    assert main(["check", str(spec), "--depth", "host", "--pool", "decod"]) == 2
    error = capsys.readouterr().err
    assert "no replica 0 of pool 'decod' - say --pool and --replica: prefill (replicas 0-0)" in error


def test_a_node_of_a_replica_on_several_hosts_binds_its_own_ports_only(tmp_path: Path) -> None:
    engines = {"hardware": "A2", "parallel": {"dp": 16}, "hosts": ["10.0.0.1", "10.0.0.2"]}
    data = cluster_data(pool("p", "prefill", 8100, **engines), pool("d", "decode", 8200))
    cluster = subject_of(parse_spec(text_of(data)).cluster)
    replica = cluster.topology.replicas[0]
    probe = Probe(root=tmp_path, search_path=str(tmp_path), python="true", node=1)
    names = {port.what for port in gather(cluster, replica, probe).ports}
    assert "HTTP of p/0 DP rank 8" in names
    assert "HTTP of p/0 DP rank 7" not in names
    assert "DP coordination of p/0" not in names, "that one is on the first host"


def test_facts_that_are_none_and_options_that_would_be_ignored_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, facts = tmp_path / "c.yaml", tmp_path / "facts.json"
    spec.write_text(text_of(cluster_data()))
    facts.write_text("[]")
    assert main(["check", str(spec), "--facts", str(facts)]) == 2
    assert "facts.json: not saved facts: " in capsys.readouterr().err
    assert main(["check", str(spec), "--facts", str(tmp_path / "none")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert main(["check", str(spec), "--save-facts", str(facts)]) == 2
    assert "--save-facts needs --depth host" in capsys.readouterr().err
