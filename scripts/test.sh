#!/usr/bin/env bash
# Set up what the tests need in .venv, then run them all.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m pytest "$@"
