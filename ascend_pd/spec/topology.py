"""The derived cluster: every replica, engine, worker, device and listening port, computed from the file alone.

Placement. A pool without `hosts` is on this machine (`127.0.0.1`) on CPU, and in Kubernetes on NPUs, where each
node of a replica is a pod with a host name and all of a node's devices of its own. A replica goes to the host
of its pool with the most free devices (CPU: the fewest engines), the first on a tie; one that needs more than a
node takes as many hosts, in file order, and its DP ranks fill them one after another. Nothing is refused here:
when room runs out, device numbers go past the node's last one, and the rule `devices-short` says so.

Ports, per host:

* HTTP: `pool.port + i` for the i-th engine (DP rank) of that pool on that host.
* Side channel: each replica gets a block of ports whose first one, its `kv_port`, is free on all of its hosts:
  the first replica on a host starts at `connector.kvPort`, the next one where that block ends. The engine of
  global DP rank r listens on `kv_port + r`. With dp > 1 the block has one more port, `kv_port + dp`, for vLLM's
  DP coordination; with engines over several hosts, dp more, `kv_port + dp + 1 + r`, for vLLM's multi-node
  start-up.

So no two replicas on a host, of one pool or of two, can collide; HTTP ports of different pools are typed by the
operator and checked by `port-overlap`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ascend_pd.models.hardware import CATALOGUE
from ascend_pd.spec.cluster import Hardware, Mode, PDCluster, PoolSpec, Role

LOOPBACK = "127.0.0.1"
WILDCARDS = frozenset({"0.0.0.0", "::", "[::]"})


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """`http://host:port`, IPv6 bracketed."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank's process."""

    tp_rank: int
    pp_rank: int
    host: str
    device: int | None
    """NPU number on its host as `npu-smi` counts; None on CPU."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine core with its own OpenAI endpoint: one DP rank of a replica."""

    engine_id: str
    pool: str
    role: Role
    replica: int
    dp_rank: int
    host: str
    """Where its API server and its scheduler run."""
    http_port: int
    kv_port: int
    """What vLLM gets as `kv_port`: the first port of the replica's block."""
    workers: tuple[Worker, ...]

    @property
    def side_channel_port(self) -> int:
        """Where this engine's side channel listens."""
        return self.kv_port + self.dp_rank

    @property
    def http(self) -> Address:
        """The OpenAI endpoint."""
        return Address(self.host, self.http_port)

    @property
    def url(self) -> str:
        """The OpenAI endpoint's base URL."""
        return self.http.url

    def devices_on(self, host: str) -> tuple[int, ...]:
        """Device numbers of this engine's workers on one host, in rank order; empty on CPU."""
        return tuple(w.device for w in self.workers if w.host == host and w.device is not None)


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of the model in a pool: dp engines."""

    pool: str
    pool_index: int
    index: int
    role: Role
    hardware: Hardware
    hosts: tuple[str, ...]
    kv_port: int
    engines: tuple[Engine, ...]
    in_kubernetes: bool

    @property
    def name(self) -> str:
        """`pool/index`."""
        return f"{self.pool}/{self.index}"

    @property
    def dp_rpc_port(self) -> int | None:
        """Port of vLLM's DP coordination on the first host; None with dp 1."""
        return self.kv_port + len(self.engines) if len(self.engines) > 1 else None

    def master_port(self, dp_rank: int) -> int | None:
        """Port of vLLM's multi-node start-up on the engine's host; None for an engine on a single host."""
        spans = len({w.host for w in self.engines[dp_rank].workers}) > 1
        return self.kv_port + len(self.engines) + 1 + dp_rank if spans else None


@dataclass(frozen=True, slots=True)
class Listener:
    """One TCP port that a process of this cluster binds."""

    address: Address
    what: str
    path: str
    """Path in the cluster file of the value it comes from."""
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything derived."""

    cluster: str
    mode: Mode
    replicas: tuple[Replica, ...]
    metaserver: Address | None
    """None in pull mode."""
    proxy: Address
    admin: Address | None
    listeners: tuple[Listener, ...] = field(repr=False)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All engines, in file order."""
        return tuple(engine for replica in self.replicas for engine in replica.engines)

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts that run an engine, in order of first use."""
        return tuple(dict.fromkeys(host for replica in self.replicas for host in replica.hosts))

    def engines_of(self, role: Role) -> tuple[Engine, ...]:
        """Engines of exactly this role."""
        return tuple(engine for engine in self.engines if engine.role is role)

    def replica(self, pool: str, index: int = 0) -> Replica | None:
        """One replica, or None."""
        return next((r for r in self.replicas if r.pool == pool and r.index == index), None)


class _Host:
    """What is taken on one host so far."""

    def __init__(self, kv_port: int) -> None:
        self.next_device = 0
        self.next_kv_port = kv_port
        self.engines = 0
        self.engines_of_pool: dict[str, int] = {}


def nodes_needed(pool: PoolSpec) -> int:
    """Hosts of one replica: an engine's tp·pp workers stay together where a node has room for them."""
    per_node = CATALOGUE[pool.hardware].devices_per_node
    if not per_node or pool.parallel.world_size <= per_node:
        return 1
    engine = pool.parallel.tp * pool.parallel.pp
    if engine > per_node:
        return -(-engine // per_node) * pool.parallel.dp
    return -(-pool.parallel.dp // (per_node // engine))


def _hosts_for(pool: PoolSpec, index: int, cluster: str, hosts: dict[str, _Host]) -> tuple[str, ...]:
    needed = nodes_needed(pool)
    if not pool.hosts and pool.hardware is not Hardware.CPU:
        base = f"{cluster}-{pool.name}-{index}"
        return tuple(f"{base}-{node}.{cluster}-{pool.name}" for node in range(needed))
    names = pool.hosts or (LOOPBACK,)
    if needed == 1:
        key = "engines" if pool.hardware is Hardware.CPU else "next_device"
        return (min(names, key=lambda name: getattr(hosts[name], key)),)
    free = sorted(names, key=lambda name: hosts[name].next_device)[:needed]
    chosen = tuple(name for name in names if name in free)
    return tuple(chosen[i % len(chosen)] for i in range(needed))


def _workers(pool: PoolSpec, dp_rank: int, on: tuple[str, ...], hosts: dict[str, _Host]) -> tuple[Worker, ...]:
    """Rank order is pp-major: pp_rank · tp + tp_rank, as vLLM counts."""
    per_node = CATALOGUE[pool.hardware].devices_per_node
    engine = pool.parallel.tp * pool.parallel.pp
    workers = []
    for rank in range(engine):
        if not per_node:
            node = 0
        elif engine > per_node:
            node = dp_rank * -(-engine // per_node) + rank // per_node
        else:
            node = dp_rank // (per_node // engine)
        host = on[min(node, len(on) - 1)]
        device = None
        if per_node:
            device = hosts[host].next_device
            hosts[host].next_device += 1
        workers.append(Worker(rank % pool.parallel.tp, rank // pool.parallel.tp, host, device))
    return tuple(workers)


def _replica(cluster: PDCluster, pool_index: int, index: int, hosts: dict[str, _Host]) -> Replica:
    pool = cluster.spec.pools[pool_index]
    name = cluster.metadata.name
    on = _hosts_for(pool, index, name, hosts)
    for host in on:
        hosts.setdefault(host, _Host(cluster.spec.connector.kv_port))
    kv_port = max(hosts[host].next_kv_port for host in on)
    engines = []
    for dp_rank in range(pool.parallel.dp):
        workers = _workers(pool, dp_rank, on, hosts)
        host = workers[0].host
        local = hosts[host].engines_of_pool.get(pool.name, 0)
        hosts[host].engines_of_pool[pool.name] = local + 1
        hosts[host].engines += 1
        suffix = f"-dp{dp_rank}" if pool.parallel.dp > 1 else ""
        engines.append(
            Engine(
                engine_id=f"{name}-{pool.name}-{index}{suffix}",
                pool=pool.name,
                role=pool.role,
                replica=index,
                dp_rank=dp_rank,
                host=host,
                http_port=pool.port + local,
                kv_port=kv_port,
                workers=workers,
            )
        )
    replica = Replica(
        pool=pool.name,
        pool_index=pool_index,
        index=index,
        role=pool.role,
        hardware=pool.hardware,
        hosts=tuple(dict.fromkeys(on)),
        kv_port=kv_port,
        engines=tuple(engines),
        in_kubernetes=not pool.hosts and pool.hardware is not Hardware.CPU,
    )
    block = len(engines) + (replica.dp_rpc_port is not None)
    if any(replica.master_port(rank) for rank in range(len(engines))):
        block = 2 * len(engines) + 1
    for host in on:
        hosts[host].next_kv_port = kv_port + block
    return replica


def _engine_listeners(replica: Replica) -> Iterator[Listener]:
    pool = f"$.spec.pools[{replica.pool_index}]"
    kv = "$.spec.connector.kvPort"
    for engine in replica.engines:
        who = f"{replica.name} DP rank {engine.dp_rank}" if len(replica.engines) > 1 else replica.name
        yield Listener(engine.http, f"HTTP of {who}", f"{pool}.port", replica.pool)
        if replica.role is not Role.UNION:  # a union engine hands nothing over
            side = Address(engine.host, engine.side_channel_port)
            yield Listener(side, f"side channel of {who}", kv, replica.pool)
        if port := replica.master_port(engine.dp_rank):
            yield Listener(Address(engine.host, port), f"multi-node start-up of {who}", kv, replica.pool)
    if port := replica.dp_rpc_port:
        yield Listener(
            Address(replica.engines[0].host, port), f"DP coordination of {replica.name}", kv, replica.pool
        )


def derive_topology(cluster: PDCluster) -> Topology:
    """Everything that follows from the file; never raises for a file that parsed."""
    spec = cluster.spec
    hosts: dict[str, _Host] = {}
    for pool in spec.pools:
        for host in pool.hosts or ((LOOPBACK,) if pool.hardware is Hardware.CPU else ()):
            hosts.setdefault(host, _Host(spec.connector.kv_port))
    replicas = tuple(
        _replica(cluster, pool_index, index, hosts)
        for pool_index, pool in enumerate(spec.pools)
        for index in range(pool.replicas)
    )
    metaserver = Address(spec.metaserver.host, spec.metaserver.port) if spec.has_metaserver else None
    proxy = Address(spec.proxy.host, spec.proxy.port)
    admin = Address(spec.proxy.admin_host, spec.proxy.admin_port) if spec.proxy.admin_port else None
    listeners = [listener for replica in replicas for listener in _engine_listeners(replica)]
    if metaserver:
        listeners.append(Listener(metaserver, "metaserver", "$.spec.metaserver.port"))
    listeners.append(Listener(proxy, "proxy", "$.spec.proxy.port"))
    if admin:
        listeners.append(Listener(admin, "admin API of the proxy", "$.spec.proxy.adminPort"))
    return Topology(
        cluster=cluster.metadata.name,
        mode=spec.connector.mode,
        replicas=replicas,
        metaserver=metaserver,
        proxy=proxy,
        admin=admin,
        listeners=tuple(listeners),
    )
