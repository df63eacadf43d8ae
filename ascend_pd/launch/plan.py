"""What is started for a cluster: one `ProcessPlan` per process, in the order of starting. Pure.

`ascend-pd up`, `ascend-pd engine` and the Kubernetes manifests all take their command lines from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ascend_pd.spec.cluster import EMBEDDED_MODEL, PDCluster
from ascend_pd.spec.topology import Engine


class Kind(StrEnum):
    """What a process is; the front processes need neither torch nor vllm."""

    METASERVER = "metaserver"
    ENGINE = "engine"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Site:
    """What the cluster file does not know about the place where the processes run."""

    python: str = "python3"
    model_dir: str = EMBEDDED_MODEL
    """Where the embedded model was prepared; used only by a cluster file whose model is `smollm2`."""
    cores: int = 0
    """CPU cores that the engines of this machine share; 0 means one OpenMP thread per engine."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process: what to run, what to add to its environment, and where it answers once it is ready."""

    name: str
    """`prefill/0`, `decode/1/dp3`, `proxy`, `metaserver`."""
    kind: Kind
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Set on top of the environment of whoever starts it."""
    host: str
    """The host it runs on, as the cluster file names it."""
    port: int
    ready_path: str = "/health"
    ports: tuple[int, ...] = ()
    """All ports it binds, `port` included."""


def engine_name(engine: Engine, dp_size: int = 1) -> str:
    """`pool/replica`, with the DP rank when there are several."""
    base = f"{engine.pool}/{engine.replica}"
    return f"{base}/dp{engine.dp_rank}" if dp_size > 1 else base


def model_path(cluster: PDCluster, pool_index: int, site: Site) -> str:
    """The model directory that a pool's engines load."""
    path = cluster.spec.pools[pool_index].overrides.model_path or cluster.spec.model.path
    return site.model_dir if path == EMBEDDED_MODEL else path


def bind_host(host: str) -> str:
    """The address to bind on a host that others reach under this name: only loopback stays closed to them."""
    if host in ("127.0.0.1", "localhost", "::1"):
        return host
    return "::" if ":" in host else "0.0.0.0"
