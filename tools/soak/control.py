"""A process that only sleeps, as the sidecar's own measure of lag does. How late it is the machine is to blame for.

A line on stdin ends it; it says what the lateness was at p99, in seconds.
"""

from __future__ import annotations

import select
import sys
import time

SLEEP_S = 0.1


def main() -> None:
    late_s = []
    due = time.monotonic() + SLEEP_S
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        now = time.monotonic()
        late_s.append(now - due)
        due = now + SLEEP_S
    late_s.sort()
    sys.stdout.write(f"{late_s[int(len(late_s) * 0.99)] if late_s else 0.0}\n")


if __name__ == "__main__":
    main()
