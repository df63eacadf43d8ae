"""From a cluster file to Kubernetes objects. Pure: `render` returns file names and texts, the command line
writes them.
"""

from __future__ import annotations

from ascend_pd.manifests.placement import place
from ascend_pd.manifests.render import render
from ascend_pd.manifests.settings import ManifestSettings

__all__ = ["ManifestSettings", "place", "render"]
