"""The hardware catalogue: what one node of each generation has.

Sources: Huawei's product pages and the MindCluster documentation (devices per node, HBM per device); the
reserved port window is that of Mooncake's Ascend direct transport (20000 + 1000 · devices,
`ascend_direct_transport`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_pd.spec.cluster import Hardware

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """One generation. `devices_per_node` is 0 where workers are plain processes."""

    hardware: Hardware
    devices_per_node: int
    device_bytes: int
    """Memory of one device; 0 where it is not known (CPU)."""
    flops: float
    """Dense bf16 operations per second of one device, from public specifications; 0 where not known."""
    bytes_per_second: float
    """Memory bandwidth of one device, likewise."""
    chips: tuple[str, ...]
    """Names that `npu-smi` prints. A3 may also print just `Ascend910`."""
    accelerator_type: str
    """Kubernetes node label `accelerator-type` of the usual machine."""

    @property
    def reserved_ports(self) -> range:
        """Ports that the direct transport takes at random."""
        return range(20000, 20000 + 1000 * self.devices_per_node)


CATALOGUE: dict[Hardware, HardwareFacts] = {
    Hardware.A2: HardwareFacts(
        Hardware.A2,
        8,
        64 * GIB,
        313e12,
        1.6e12,
        ("910B1", "910B2", "910B2C", "910B3", "910B4", "910B4-1"),
        "module-910b-8",
    ),
    Hardware.A3: HardwareFacts(
        Hardware.A3,
        16,
        64 * GIB,
        376e12,
        1.6e12,
        (
            "Ascend910_9391",
            "Ascend910_9381",
            "Ascend910_9372",
            "Ascend910_9392",
            "Ascend910_9382",
            "Ascend910_9362",
        ),
        "module-a3-16",
    ),
    Hardware.CPU: HardwareFacts(Hardware.CPU, 0, 0, 0.0, 0.0, (), ""),
}
