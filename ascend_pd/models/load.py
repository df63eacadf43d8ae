"""Reading a model directory: the one I/O file of this package. Nothing is executed and no weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ascend_pd.models.config_json import facts_from_config
from ascend_pd.models.facts import SMOLLM2, ModelFacts, with_geometry
from ascend_pd.spec.cluster import EMBEDDED_MODEL, GeometrySpec

MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20


def read_json(path: Path, limit: int) -> dict[str, Any] | None:
    """A JSON object, or None when the file is missing, too large or not one."""
    try:
        if not path.is_file() or path.stat().st_size > limit:
            return None
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def weight_bytes(directory: Path) -> int | None:
    """Bytes of weights: the safetensors index's total, else the sizes of the files, else None."""
    index = read_json(directory / "model.safetensors.index.json", MAX_INDEX_BYTES)
    if index:
        total = index.get("metadata", {}).get("total_size") if isinstance(index.get("metadata"), dict) else None
        if isinstance(total, int | float) and total > 0:
            return int(total)
    try:
        return sum(path.stat().st_size for path in directory.glob("*.safetensors")) or None
    except OSError:
        return None


def load_facts(path: str, geometry: GeometrySpec) -> ModelFacts:
    """What is known of the model at `path`, with the operator's geometry laid over it; never raises."""
    if path == EMBEDDED_MODEL:
        return with_geometry(SMOLLM2, geometry)
    directory = Path(path)
    config = read_json(directory / "config.json", MAX_CONFIG_BYTES)
    if config is None:
        return with_geometry(None, geometry)
    return with_geometry(facts_from_config(config, "config.json", weight_bytes(directory)), geometry)
