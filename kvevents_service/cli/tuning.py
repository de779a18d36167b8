"""What the interpreter of a sidecar, or of a relay, is set to."""

from __future__ import annotations

import gc
import sys

GC_THRESHOLD = 50_000
"""Blocks make no garbage cycles; a rarer collector keeps its pauses out of lookups."""
SWITCH_S = 0.0005
"""So long the loop waits for a copy thread to give the interpreter back. By default it is 5 ms, at each call."""


def tune_process() -> None:
    """Call it when all is loaded: what is there by then is not looked through again."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(GC_THRESHOLD)
    gc.collect()
    gc.freeze()
