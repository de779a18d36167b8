"""What the disk tier counts of faults, and of blocks it came too late for, in the log: the first of a kind, the
tenth, the hundredth and so on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kvevents_service.service.rarely import is_told_since

log = logging.getLogger(__name__)

SAID = {
    "disk_layouts_void": "what was kept is of another layout and is void",
    "disk_blocks_not_kept": "a block will not be found after a restart",
}
NO_FAULT = {"evicted_unsaved": "a block left host memory before it was on the disk: a burst, or a slow disk"}
FAULT = "disk_errors_"


class DiskWatch:
    """Compares counters with what they were at the last look."""

    def __init__(self, stats: Callable[[], dict[str, int]]) -> None:
        self._stats = stats
        self._seen: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<DiskWatch {dict(self._seen)}>"

    def look(self) -> None:
        """Say what has grown by enough. Call it now and then, and at the end."""
        for name, count in self._stats().items():
            said = f"an error ({name.removeprefix(FAULT)})" if name.startswith(FAULT) else SAID.get(name)
            if is_told_since(self._seen[name], count) and (said or name in NO_FAULT):
                level = logging.WARNING if said else logging.INFO
                log.log(level, "disk_path: %s (%d so far)", said or NO_FAULT[name], count)
            self._seen[name] = count
