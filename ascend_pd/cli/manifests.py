"""`ascend-pd manifests SPEC -o DIR`: Kubernetes YAML."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from ascend_pd.check import require_startable
from ascend_pd.errors import OperatorError
from ascend_pd.manifests import ManifestSettings, place, render
from ascend_pd.spec.load import load_spec

HELP = {
    "namespace": "written into every object (default: left to kubectl -n)",
    "npu_image": "image of NPU engines",
    "cpu_image": "image of CPU engines",
    "proxy_image": "image of the proxy",
    "metaserver_image": "image of the metaserver",
    "npu_resource": "resource name of the device plugin",
    "accelerator_type": "node label accelerator-type (default: the generation's usual one)",
    "scheduler": "scheduler of NPU pods",
    "model_claim": "PersistentVolumeClaim with the model (default: the node's own directory)",
    "shm_size": "size of /dev/shm",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments; those of ManifestSettings are derived from its fields."""
    parser.add_argument("spec", metavar="SPEC", help="the cluster file, without hosts")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="where the files go")
    defaults = ManifestSettings()
    for field in fields(ManifestSettings):
        default = getattr(defaults, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        text = HELP[field.name] + (f" (default: {default})" if default else "")
        parser.add_argument(flag, metavar="TEXT", default=default, help=text)


def run(args: argparse.Namespace) -> int:
    """0 after writing all files; their names are printed.

    Raises:
        OperatorError: the cluster cannot work or cannot be placed; the directory cannot be written.
    """
    cluster = load_spec(args.spec)
    require_startable(place(cluster), args.spec)
    settings = ManifestSettings(**{field.name: getattr(args, field.name) for field in fields(ManifestSettings)})
    files = render(cluster, settings)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (args.output / name).write_text(text, encoding="utf-8")
            print(args.output / name)
    except OSError as error:
        raise OperatorError(f"{args.output}: {error.strerror}", "choose another directory") from error
    return 0
