"""`ascend-pd proxy [SPEC] [OPTION …]`: become `python -m proxy`, which reads the cluster file, and again on demand."""

from __future__ import annotations

from ascend_pd.launch.front_command import FRONT_ENV
from ascend_pd.launch.front_process import become, split_spec
from ascend_pd.spec.load import load_spec


def forward(arguments: list[str]) -> int:
    """Never returns when the proxy could be started; options after SPEC override what the file says."""
    spec, options = split_spec(arguments)
    if spec is not None:
        load_spec(spec)  # a mistake in the file is told here, with all its problems
        options = ["--spec", str(spec), *options]
    return become("proxy", options, FRONT_ENV)
