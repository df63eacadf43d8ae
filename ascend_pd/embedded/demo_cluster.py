"""The cluster of the demo: one prefill and one decode engine, a proxy, and in layer-wise mode a metaserver."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_pd.spec.cluster import Mode

SERVED_NAME = "smollm2"


@dataclass(frozen=True, slots=True)
class DemoPorts:
    """Free ports; the side channels take `kv` and the one after it."""

    prefill: int
    decode: int
    proxy: int
    metaserver: int
    kv: int


def demo_cluster_text(mode: Mode, ports: DemoPorts) -> str:
    """The cluster file, as a person would write it."""
    metaserver = f"\n  metaserver: {{host: 127.0.0.1, port: {ports.metaserver}}}" if mode is Mode.LAYERWISE else ""
    return f"""\
# What `ascend-pd demo --mode {mode.value}` ran. `ascend-pd up` starts it again.
apiVersion: ascend-pd/v1
kind: PDCluster
metadata:
  name: demo-{mode.value}
spec:
  model: {{path: smollm2, servedName: {SERVED_NAME}, maxModelLen: 2048, dtype: float32}}
  engine: {{blockSize: 128}}
  connector: {{mode: {mode.value}, transport: mooncake, protocol: tcp, kvPort: {ports.kv}}}
  pools:
    - {{name: prefill, role: prefill, hardware: cpu, port: {ports.prefill}}}
    - {{name: decode, role: decode, hardware: cpu, port: {ports.decode}}}
  proxy: {{host: 127.0.0.1, port: {ports.proxy}}}{metaserver}
"""
