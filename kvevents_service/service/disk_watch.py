"""Faults that the disk tier counts, in the log: the first of a kind, the tenth, the hundredth and so on."""

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
            if said is not None and is_told_since(self._seen[name], count):
                log.warning("disk_path: %s (%d so far)", said, count)
            self._seen[name] = count
