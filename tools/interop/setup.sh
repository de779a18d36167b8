#!/usr/bin/env bash
# The real programs that `make interop` asks, each in a virtual environment of its own under DIR.
# usage: setup.sh DIR          (PYTHON names the interpreter; a finished environment is left as it is)
set -euo pipefail
D=${1:?usage: setup.sh DIR}

environment() { # NAME REQUIREMENT...
    local home="$D/$1"
    shift
    [ -e "$home/.ready" ] && return
    rm -rf "$home"
    "${PYTHON:-python3}" -m venv "$home"
    "$home/bin/pip" -q --no-input --disable-pip-version-check install "$@"
    touch "$home/.ready"
}

mkdir -p "$D"
environment dynamo ai-dynamo-runtime==1.6.1
environment vllm-router vllm-router==0.1.17
