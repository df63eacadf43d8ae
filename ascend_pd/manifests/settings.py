"""What Kubernetes needs to know and the cluster file does not say."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_pd import __version__
from ascend_pd.spec.cluster import Hardware

SPEC_PATH = "/etc/ascend-pd/cluster.yaml"
"""Where every pod finds the placed cluster file."""


@dataclass(frozen=True, slots=True)
class ManifestSettings:
    """Defaults fit MindCluster (device plugin, Ascend Docker Runtime, Volcano)."""

    namespace: str = ""
    """Written into every object; empty leaves it to `kubectl -n`."""
    npu_image: str = f"ascend-pd-engine-npu:{__version__}"
    cpu_image: str = f"ascend-pd-engine-cpu:{__version__}"
    proxy_image: str = f"ascend-pd-proxy:{__version__}"
    metaserver_image: str = f"ascend-pd-metaserver:{__version__}"
    npu_resource: str = "huawei.com/Ascend910"
    """`huawei.com/ascend-1980` on CCE; see `kubectl get node -o jsonpath={.status.allocatable}`."""
    accelerator_type: str = ""
    """Node label `accelerator-type`; empty means the generation's usual one."""
    scheduler: str = "volcano"
    """For NPU pods."""
    model_claim: str = ""
    """A PersistentVolumeClaim with the model, mounted at `model.path`; empty means the node's own directory."""
    shm_size: str = "32Gi"

    def image(self, hardware: Hardware) -> str:
        """The engine's image."""
        return self.cpu_image if hardware is Hardware.CPU else self.npu_image
