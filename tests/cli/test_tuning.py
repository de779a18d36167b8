"""What `serve` and `relay` set the interpreter to, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, sys
from kvevents_service.cli.tuning import tune_process
before = sys.getswitchinterval(), gc.get_threshold()[0], gc.get_freeze_count()
tune_process()
after = sys.getswitchinterval(), gc.get_threshold()[0], gc.get_freeze_count()
assert after[0] < before[0] and after[1] > before[1] and after[2] > before[2], (before, after)
"""


def test_threads_give_way_soon_and_garbage_is_looked_for_rarely_and_not_in_what_was_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
