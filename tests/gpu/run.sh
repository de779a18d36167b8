#!/usr/bin/env bash
# The CUDA data plane on a machine with one GPU: CUDA IPC between two processes, a 2 GiB KV cache stored, evicted and
# loaded with every word checked, fences under reuse, an engine killed in the middle of its copies, vLLM's connector (its
# two halves with a scheduler that plays vLLM's, and a real vLLM where PYTHON has one), and how fast blocks go compared
# with one pinned copy. One JSON line a check; at most 4 minutes, and 4 more for a real vLLM.
#
#   tests/gpu/run.sh            on the GPU
#   tests/gpu/run.sh --cpu      the same logic with shared memory in the place of the GPU: no figures
#
# Prepare: PYTHON (default python3) is a Python 3.11+ with torch for CUDA, and what `serve` imports: numpy msgspec pyzmq
# click uvloop h11 prometheus-client tomli-w xxhash. What is missing there, and needs no network here, comes from a
# folder of wheels, into a folder of its own:
#   (before, with a network)  pip download --no-deps --only-binary=:all: -d wheels msgspec pyzmq xxhash  # for that Python
#   (here)                    WHEELS=wheels tests/gpu/run.sh
# The package itself need not be installed.
#
# Exit codes: 0 all good, 1 a check failed, 3 no GPU, 124 it took longer than 8 minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH=$PYTHONPATH:$site
if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
fi
timeout --kill-after=10 470 "$PYTHON" tests/gpu/checks.py "$@"
