"""An index of prefixes by tokens, as most routers keep it: the publisher's hashes are only names of its nodes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from doubles.reading import leading

Path = tuple[Hashable, ...]
"""What identifies each block from the start of the prompt on."""


class Tree:
    """Per tier, which path a hash stands for."""

    def __init__(self) -> None:
        self.tiers: dict[str, dict[Any, Path]] = {}

    def store(self, tier: str, base: Path | None, hashes: Sequence[Any], keys: Sequence[Hashable]) -> None:
        """Blocks behind `base`; nothing if that is None, an unknown parent."""
        if base is not None:
            for place, name in enumerate(hashes, 1):
                self.tiers.setdefault(tier, {})[name] = (*base, *keys[:place])

    def path(self, tier: str, name: Any) -> Path | None:
        """Where a hash stands on a tier."""
        return self.tiers.get(tier, {}).get(name)

    def remove(self, tier: str, name: Any) -> Path | None:
        return self.tiers.get(tier, {}).pop(name, None)

    def clear(self) -> None:
        self.tiers.clear()

    def held(self) -> dict[str, set[Any]]:
        """The hashes on each tier that has any."""
        return {tier: set(names) for tier, names in self.tiers.items() if names}

    def match(self, keys: Sequence[Hashable]) -> dict[str, int]:
        """Leading blocks that each tier has."""
        paths = {tier: set(names.values()) for tier, names in self.tiers.items()}
        prefixes = [tuple(keys[:length]) for length in range(1, len(keys) + 1)]
        return {tier: leading(prefix in there for prefix in prefixes) for tier, there in paths.items()}
