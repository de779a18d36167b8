#!/usr/bin/env bash
# Makes .venv with everything the demo and the tests need. Run by make; safe to run again.
# torch: an installed GPU build is kept; without a GPU the small CPU build is taken.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TORCH_CPU=2.13.0
say() { echo "setup: $*" >&2; }

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  say "Python 3.11 or newer is needed; $("$PYTHON" --version) was found (set PYTHON=...)"; exit 1
fi
SITE=
if "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  say "a torch with a GPU is installed: using it"; SITE=--system-site-packages
fi
[ -x .venv/bin/python ] || "$PYTHON" -m venv $SITE .venv
PIP=".venv/bin/python -m pip install -q --no-input --disable-pip-version-check"
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  say "installing torch (CPU build)"
  # A CPU build from whatever pip is set up with, else PyTorch's own index of CPU builds, else what pip finds.
  $PIP "torch==$TORCH_CPU+cpu" 2>/dev/null ||
    $PIP --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH_CPU" 2>/dev/null ||
    $PIP "torch==$TORCH_CPU"
fi
say "installing kvevents-service and its test tools"
$PIP -e '.[offload,top,nats,dev]' 2> >(grep -v "is ignored: it is neither" >&2)
say "ready: .venv/bin/kvevents"
