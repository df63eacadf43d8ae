#!/usr/bin/env bash
# Check a machine and a cluster file with everything that only real hardware can show; writes one report. See docs/hardware.md.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { echo "npu_validate: error: no python3 - set PYTHON" >&2; exit 2; }
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m scripts.validation "$@"
