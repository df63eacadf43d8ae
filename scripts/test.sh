#!/usr/bin/env bash
# Set up what the tests need in .venv, then run linters, type checks and all tests; arguments go to pytest alone.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.11}
"$python" -c "" 2>/dev/null || { echo "setup: error: $python is not there - install Python 3.11, or name it: PYTHON=/path/to/python3.11" >&2; exit 1; }
"$python" scripts/setup_env.py --test
if [ $# -eq 0 ]; then
  .venv/bin/ruff check .
  .venv/bin/ruff format --check .
  .venv/bin/mypy
fi
exec .venv/bin/python -m pytest "$@"
