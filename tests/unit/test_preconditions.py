"""What must hold before a start: each failure is one line that names the thing and the remedy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from ascend_pd.errors import OperatorError
from ascend_pd.launch import preconditions
from ascend_pd.launch.plan import Kind, ProcessPlan
from ascend_pd.spec.load import load_spec
from ascend_pd.spec.parse import parse_spec
from ascend_pd.spec.topology import derive_topology

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "cpu-1p1d.yaml"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def plan(port: int) -> ProcessPlan:
    return ProcessPlan("decode/0", Kind.ENGINE, ("x",), {}, "127.0.0.1", port, ports=(port,))


def test_a_port_in_use_names_the_process_and_the_port(taken_port: int) -> None:
    with pytest.raises(
        OperatorError, match=f"decode/0 cannot have port {taken_port} on 127.0.0.1: Address already"
    ):
        preconditions.require_free_ports(plan(taken_port))


def test_a_free_port_passes_and_stays_free(taken_port: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    preconditions.require_free_ports(plan(free))
    preconditions.require_free_ports(plan(free))


def test_a_port_past_the_last_one_is_refused() -> None:
    with pytest.raises(OperatorError, match="65536 is not a port"):
        preconditions.require_free_ports(plan(65536))


def test_a_model_directory_is_judged_before_any_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="does not exist"):
        preconditions.require_model(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError, match="not a directory"):
        preconditions.require_model(tmp_path / "file")
    with pytest.raises(OperatorError, match=r"no config\.json"):
        preconditions.require_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OperatorError, match="no weights"):
        preconditions.require_model(tmp_path)
    (tmp_path / "model.safetensors").touch()
    preconditions.require_model(tmp_path)


def test_a_missing_system_library_names_the_debian_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditions, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(preconditions, "SYSTEM_LIBRARIES", {"libnot-there.so.9": "libnotthere9"})
    with pytest.raises(OperatorError, match=r"Mooncake needs libnotthere9.*apt-get install libnotthere9"):
        preconditions.require_engine_modules(load_spec(EXAMPLE))


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditions, "find_spec", lambda name: None)
    with pytest.raises(OperatorError, match="vLLM is not installed here - on a CPU use the"):
        preconditions.require_engine_modules(load_spec(EXAMPLE))


def test_a_foreign_package_of_the_same_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    preconditions.require_our_packages()
    foreign = ModuleSpec("proxy", None, origin=str(tmp_path / "proxy" / "__init__.py"))
    found = preconditions.find_spec
    monkeypatch.setattr(preconditions, "find_spec", lambda name: foreign if name == "proxy" else found(name))
    with pytest.raises(OperatorError, match=r"package 'proxy' at .* is not ascend-pd's"):
        preconditions.require_our_packages()


def test_up_refuses_a_cluster_that_is_not_all_here() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    preconditions.require_local(derive_topology(load_spec(EXAMPLE)))
    elsewhere = parse_spec(text.replace("port: 8200", "port: 8200\n      hosts: [192.0.2.7]")).cluster
    with pytest.raises(OperatorError, match=r"host 192\.0\.2\.7 of the cluster file is not this machine"):
        preconditions.require_local(derive_topology(elsewhere))
    kubernetes = parse_spec(text.replace("hardware: cpu", "hardware: A2")).cluster
    with pytest.raises(OperatorError, match="made for Kubernetes"):
        preconditions.require_local(derive_topology(kubernetes))
