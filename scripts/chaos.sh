#!/usr/bin/env bash
# Run the chaos suite alone: scripts/chaos.sh [ROUNDS], each round every fault in both modes.
set -euo pipefail
cd "$(dirname "$0")/.."
python3.11 scripts/setup_env.py --test
export ASCEND_PD_CHAOS_ROUNDS=${1:-1} ASCEND_PD_CHAOS_RECORD=${ASCEND_PD_CHAOS_RECORD:-chaos-record.json}
.venv/bin/python -m pytest tests/e2e/test_chaos.py -s
echo "chaos: numbers in $ASCEND_PD_CHAOS_RECORD"
