"""`make e2e`: a real vLLM on CPU with a real sidecar.

    python tools/e2e DIR [--interop DIR] [--point N]... [--keep DIR]

DIR is an engine's virtual environment, vLLM 0.32 for CPU under `venv` and the Python of 0.33 under `graft`
(docs/vllm.md says how to make one). Prints JSON lines, each with `point` and `ok`; exit code 1 if one is not ok.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "interop"))

from points import Facts, Show
from stage import Home

from kvevents_service.errors import KvEventsError


def play(show: Show, point: int) -> Iterator[Facts]:
    """The point's lines as they come. What breaks off is a line that is not ok."""
    try:
        yield from show.points[point]()
    except (OSError, RuntimeError, KvEventsError) as error:
        yield {"ok": False, "broke_off": f"{type(error).__name__}: {error}"[-600:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--interop", type=Path, default=Path(".interop"), help="as `make interop` uses it")
    parser.add_argument("--point", type=int, action="append", default=[], help="only these")
    parser.add_argument("--keep", type=Path, help="keep all logs in this directory")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with its processes
    with tempfile.TemporaryDirectory(prefix="kvevents-e2e-") as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        show = Show(Home(options.directory.resolve()), options.interop.resolve(), directory)
        try:
            return 0 if all([report(show, point) for point in options.point or show.points]) else 1
        finally:
            show.close()


def report(show: Show, point: int) -> bool:
    started, good = time.monotonic(), True
    for line in play(show, point):
        good &= line["ok"]
        sys.stdout.write(json.dumps({"point": point, **line}) + "\n")
        sys.stdout.flush()
    sys.stderr.write(f"e2e: point {point}: {time.monotonic() - started:.0f} s\n")
    return good


if __name__ == "__main__":
    sys.exit(main())
