#!/usr/bin/env bash
# Set up what the demo needs in .venv, then prefill on one engine and decode on another.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.11}
"$python" -c "" 2>/dev/null || { echo "setup: error: $python is not there - install Python 3.11, or name it: PYTHON=/path/to/python3.11" >&2; exit 1; }
"$python" scripts/setup_env.py
exec .venv/bin/ascend-pd demo "$@"
