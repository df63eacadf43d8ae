"""`ascend-pd metaserver [SPEC] [OPTION …]`: become `python -m metaserver`, told what the cluster file says."""

from __future__ import annotations

from ascend_pd.launch.front_command import FRONT_ENV, metaserver_arguments
from ascend_pd.launch.front_process import become, split_spec
from ascend_pd.spec.load import load_spec


def forward(arguments: list[str]) -> int:
    """Never returns when the metaserver could be started; options after SPEC override what the file says."""
    spec, options = split_spec(arguments)
    if spec is not None:
        options = [*metaserver_arguments(load_spec(spec)), *options]
    return become("metaserver", options, FRONT_ENV)
