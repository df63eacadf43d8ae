"""There are not enough devices, or a tensor parallel group would cross machines.

A replica takes tp · pp · dp devices; a node has 8 (A2) or 16 (A3). Tensor parallel ranks talk at every layer
and must share a node; pipeline stages and DP ranks may be on several. `hosts` must have room for all replicas
of all pools on them.

Fix: add hosts, or lower `replicas`, `dp` or `tp`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Pool, Subject
from ascend_pd.spec.topology import nodes_needed

NAME = "devices-short"
SEVERITY = "error"
ZH = """设备不够，或张量并行组会跨机器。

一个副本占用 tp · pp · dp 个设备；一个节点有 8 个（A2）或 16 个（A3）。张量并行 rank 每层都要通信，必须在同
一节点；流水线阶段与 DP rank 可以跨节点。`hosts` 必须容得下其上所有池的所有副本。

处理：增加主机，或降低 `replicas`、`dp` 或 `tp`。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """TP inside a node, hosts listed once, room for everything."""
    crossing = set()
    for pool in subject.pools:
        if found := _tp_across_nodes(subject, pool):
            crossing.add(pool.index)
            yield found
        repeated = sorted({host for host in pool.spec.hosts if pool.spec.hosts.count(host) > 1})
        if repeated:
            yield error(
                NAME, f"{pool.path}.hosts", f"listed more than once: {', '.join(repeated)}", "list each once"
            )
    yield from _over_committed(subject, crossing)


def _tp_across_nodes(subject: Subject, pool: Pool) -> Finding | None:
    per_node, tp = pool.hardware.devices_per_node, pool.spec.parallel.tp
    if not per_node:
        return None
    path = f"{pool.path}.parallel.tp"
    if tp > per_node:
        message = (
            f"pool {pool.name!r}: tp {tp} needs {tp} devices on one node, {pool.spec.hardware} has {per_node}"
        )
        return error(NAME, path, message, f"tp at most {per_node}; use pp or dp for the rest")
    engine = tp * pool.spec.parallel.pp
    if engine > per_node and per_node % tp:
        message = (
            f"pool {pool.name!r}: stages of tp {tp} do not fill a node of {per_node}, so one would cross nodes"
        )
        return error(NAME, path, message, f"choose a tp that divides {per_node}")
    return None


def _over_committed(subject: Subject, skip: set[int]) -> Iterator[Finding]:
    needed: dict[str, int] = defaultdict(int)
    pools_on: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for replica in subject.topology.replicas:
        if replica.in_kubernetes:
            continue
        for engine in replica.engines:
            for worker in engine.workers:
                if worker.device is not None:
                    needed[worker.host] = max(needed[worker.host], worker.device + 1)
                    pools_on[worker.host][replica.pool_index] += 1
    told = set()
    for host, count in needed.items():
        index = max(pools_on[host])
        pool = subject.pools[index]
        if count <= pool.hardware.devices_per_node or index in told or index in skip:
            continue
        told.add(index)
        shares = ", ".join(f"{subject.pools[i].name} {n}" for i, n in pools_on[host].items())
        nodes = pool.spec.replicas * nodes_needed(pool.spec)
        message = f"host {host} has {pool.hardware.devices_per_node} devices and would need {count} ({shares})"
        fix = (
            f"list more hosts ({nodes} nodes hold this pool alone, one replica each), or lower replicas, dp or tp"
        )
        yield error(NAME, f"{pool.path}.hosts", message, fix)
