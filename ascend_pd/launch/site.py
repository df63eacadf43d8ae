"""What the place where processes run adds to a cluster file: its interpreter, its cores, the embedded model."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import ascend_pd
from ascend_pd.embedded.model import default_model_dir, embedded_gguf, prepare_model
from ascend_pd.launch.plan import ProcessPlan, Site
from ascend_pd.progress import Progress
from ascend_pd.spec.cluster import EMBEDDED_MODEL, PDCluster


def this_site(model_dir: Path | None = None) -> Site:
    """This machine, with the interpreter that is running."""
    return Site(
        python=sys.executable,
        model_dir=str(model_dir or default_model_dir()),
        cores=len(os.sched_getaffinity(0)),
    )


def require_embedded_model(cluster: PDCluster, site: Site) -> None:
    """Prepare the embedded model where a cluster file asks for it; a moment when that was done before.

    Raises:
        OperatorError: it cannot be prepared.
    """
    paths = {pool.overrides.model_path or cluster.spec.model.path for pool in cluster.spec.pools}
    if EMBEDDED_MODEL in paths:
        with Progress("model") as progress:
            prepare_model(embedded_gguf(), Path(site.model_dir), progress)


def as_shell(plan: ProcessPlan) -> str:
    """The plan as commands for a POSIX shell: paste them and the same process runs."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in plan.env.items()]
    words: list[str] = []
    for word in plan.argv:
        # One option a line; its value stays with it.
        if word.startswith("-") and not word[1:2].isdigit() and words and word != "-m":
            words.append("\\\n ")
        words.append(shlex.quote(word))
    return "\n".join([*lines, "exec " + " ".join(words)])


def full_environment(plan: ProcessPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the process: what is inherited, then the plan's own.

    A checkout that is run without being installed stays importable, whatever folder the process starts in.
    """
    env = {**inherited, **plan.env}
    home = Path(ascend_pd.__file__).parent.parent
    if home.name not in ("site-packages", "dist-packages"):
        paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
        if str(home) not in paths:
            env["PYTHONPATH"] = os.pathsep.join([str(home), *paths])
    return env
