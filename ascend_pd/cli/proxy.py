"""`ascend-pd proxy [SPEC] [OPTION …]`: become `python -m proxy`, told what the cluster file says."""

from __future__ import annotations

from ascend_pd.launch.front_command import FRONT_ENV, proxy_arguments
from ascend_pd.launch.front_process import become, split_spec
from ascend_pd.spec.load import load_spec
from ascend_pd.spec.topology import derive_topology


def forward(arguments: list[str]) -> int:
    """Never returns when the proxy could be started; options after SPEC override what the file says."""
    spec, options = split_spec(arguments)
    if spec is not None:
        cluster = load_spec(spec)
        options = [*proxy_arguments(cluster, derive_topology(cluster)), *options]
    return become("proxy", options, FRONT_ENV)
