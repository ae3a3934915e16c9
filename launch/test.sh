#!/usr/bin/env bash
# Sets up if need be, then runs every check and every test but the slow ones (pytest -m slow: 8 and 16 ranks, some
# minutes), and stops at the first stage that fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stage() {
    local name=$1 start=$SECONDS
    shift
    echo "=== $name"
    "$@" || {
        echo "=== $name failed after $((SECONDS - start)) s" >&2
        exit 1
    }
    echo "=== $name: $((SECONDS - start)) s"
}

stage "set-up" launch/setup.sh --old-transformers

export PATH="$PWD/.venv/bin:$PATH" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/.torch_ext}"
stage "browser" tests/observe/install_browser.sh
stage "compiled op" env VENV="$PWD/.venv" launch/cpu_op.sh build

stage "ruff check" ruff check .
stage "ruff format" ruff format --check .
stage "mypy" mypy
stage "lint-imports" lint-imports
stage "tests" pytest -m "not slow"
stage "presets on transformers 5.8.0" env PYTHONPATH=.transformers/5.8.0 \
    pytest tests/multirank/test_presets.py tests/multirank/test_against_deepspeed.py \
    tests/multirank/test_trainer.py tests/multirank/test_trainer_runs.py
