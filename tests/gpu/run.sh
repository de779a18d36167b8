#!/usr/bin/env bash
# The CUDA data plane on a machine with one GPU: CUDA IPC between two processes, a 2 GiB KV cache stored, evicted and
# loaded with every word checked, fences under reuse, an engine killed in the middle of its copies, and how fast blocks
# go compared with one pinned copy. One JSON line a check; at most 4 minutes.
#
#   tests/gpu/run.sh            on the GPU
#   tests/gpu/run.sh --cpu      the same logic with shared memory in the place of the GPU: no figures
#
# Prepare: PYTHON (default python3) is a Python 3.11+ with torch for CUDA, numpy and this package's dependencies. What
# is missing there, and needs no network here, comes from a folder of wheels, into a folder of its own:
#   (before, with a network)  pip download --no-deps --only-binary=:all: -d wheels msgspec pyzmq   # for that Python
#   (here)                    WHEELS=wheels tests/gpu/run.sh
#
# Exit codes: 0 all good, 1 a check failed, 3 no GPU, 124 it took longer than 4 minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
    PYTHONPATH=$PYTHONPATH:$site
fi
timeout --kill-after=10 230 "$PYTHON" tests/gpu/checks.py "$@"
