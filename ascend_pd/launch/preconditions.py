"""What must hold on this machine before a process is started; each failure is one clear line.

Found here in milliseconds, these would otherwise be a traceback in a log after a minute of imports.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import ascend_pd
from ascend_pd.errors import OperatorError
from ascend_pd.launch.plan import Kind, ProcessPlan, bind_host
from ascend_pd.spec.cluster import PDCluster
from ascend_pd.spec.topology import Topology

SYSTEM_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1"}
"""Shared library → Debian package: Mooncake's module links to both, also when it only speaks TCP."""
OUR_PACKAGES = ("connectors", "metaserver", "proxy")
_ENGINE_MODULES = {"vllm": "vLLM", "mooncake": "Mooncake", "memfabric_hybrid": "MemFabric"}


def require_runnable(cluster: PDCluster, plans: Sequence[ProcessPlan]) -> None:
    """Judge what a start on this machine needs.

    Raises:
        OperatorError: the first thing that is missing or in the way, and what to do about it.
    """
    require_our_packages()
    engines = [plan for plan in plans if plan.kind is Kind.ENGINE]
    if engines:
        require_engine_modules(cluster)
        for path in dict.fromkeys(_value_of(plan, "--model") for plan in engines):
            require_model(Path(path))
    for plan in plans:
        require_free_ports(plan)


def require_local(topology: Topology) -> None:
    """Every role of the cluster runs on this machine.

    Raises:
        OperatorError: naming the first that does not.
    """
    if any(replica.in_kubernetes for replica in topology.replicas):
        raise OperatorError(
            f"cluster {topology.cluster} is made for Kubernetes: its pools name no hosts",
            "use `ascend-pd manifests`, or give the pools hosts",
        )
    for host in topology.hosts:
        if not _is_local(host):
            raise OperatorError(
                f"host {host} of the cluster file is not this machine",
                "run `ascend-pd engine` on each host, and `ascend-pd proxy` on one",
            )


def _is_local(host: str) -> bool:
    """Only an address of this machine can be bound."""
    try:
        family, kind, protocol, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def require_our_packages() -> None:
    """`proxy` and `connectors` are also names of other published packages: the ones found must be ours."""
    home = Path(ascend_pd.__file__).parent.parent
    for name in OUR_PACKAGES:
        spec = find_spec(name)
        origin = Path(spec.origin).parent if spec and spec.origin else None
        if origin is None:
            raise OperatorError(f"the package {name!r} of ascend-pd is not installed", "install ascend-pd again")
        if origin.parent.resolve() != home.resolve():
            raise OperatorError(
                f"the package {name!r} at {origin} is not ascend-pd's",
                "uninstall the other one, or use a venv of its own",
            )


def require_engine_modules(cluster: PDCluster) -> None:
    """vLLM and the transport are installed, and the system libraries they load are there."""
    transport = "memfabric_hybrid" if cluster.spec.connector.transport == "memfabric" else "mooncake"
    for module in ("vllm", transport):
        if find_spec(module) is None:
            raise OperatorError(
                f"{_ENGINE_MODULES[module]} is not installed here",
                "on a CPU use the .venv of scripts/demo.sh, on Ascend: pip install 'ascend-pd[npu]'",
            )
    if transport != "mooncake":
        return
    missing = [package for library, package in SYSTEM_LIBRARIES.items() if not _can_load(library)]
    if missing:
        names = " and ".join(missing)
        raise OperatorError(
            f"Mooncake needs {names}, which this system lacks", f"apt-get install {' '.join(missing)}"
        )


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def require_model(path: Path) -> None:
    """The path is a Hugging Face model directory."""
    if not path.exists():
        raise OperatorError(f"the model directory {path} does not exist", "correct spec.model.path")
    if not path.is_dir():
        raise OperatorError(f"the model path {path} is not a directory", "name a Hugging Face model directory")
    if not (path / "config.json").is_file():
        raise OperatorError(f"{path} is not a model directory: it has no config.json", "correct spec.model.path")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise OperatorError(
            f"{path} holds no weights (*.safetensors)", "finish its download, or correct spec.model.path"
        )


def require_free_ports(plan: ProcessPlan) -> None:
    """Nothing else listens where this process will."""
    for port in plan.ports:
        if not 0 < port < 65536:
            raise OperatorError(f"{plan.name}: {port} is not a port", "correct the ports of the cluster file")
        host = bind_host(plan.host) if plan.kind is Kind.ENGINE else plan.host
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                # As servers do: the last run's connections that linger are no obstacle, a listener is.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            raise OperatorError(
                f"{plan.name} cannot have port {port} on {host}: {error.strerror}",
                "stop what uses it, or give another port in the cluster file",
            ) from error


def _value_of(plan: ProcessPlan, option: str) -> str:
    return plan.argv[plan.argv.index(option) + 1]
