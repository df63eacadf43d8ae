"""`ascend-pd model [DIR]`: prepare the embedded demo model."""

from __future__ import annotations

import argparse
from pathlib import Path

from ascend_pd.embedded.model import default_model_dir, embedded_gguf, prepare_model
from ascend_pd.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=Path,
        default=default_model_dir(),
        help="where the Hugging Face directory goes (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the model and print its directory on standard output."""
    with Progress("model") as progress:
        directory = prepare_model(embedded_gguf(), args.directory, progress)
    print(directory)
    return 0
