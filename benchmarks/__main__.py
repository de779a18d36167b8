"""`python -m benchmarks [NAME...]`: every bench in a process of its own, one JSON line each on stdout.

ORACLE=DIR names a virtual environment made by setup_oracle.sh; without it the peer's numbers are null.
Exit codes: 0 all measured, 1 a bench failed, 2 no such bench.
"""

from __future__ import annotations

import subprocess
import sys
import time

NAMES = (
    *("engine_step", "sidecar_step", "events_cost", "publish", "decode", "replay", "subscribers", "lookup"),
    *("index_memory", "copy", "copy_disk", "relay"),
)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"benchmarks: no bench {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    failed = [name for name in names or NAMES if not _run(name)]
    if failed:
        print(f"benchmarks: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str) -> bool:
    started = time.monotonic()
    print(f"== {name}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False)
    print(f"== {name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
