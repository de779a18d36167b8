"""Which events `kvevents tail` shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvevents_service.core.residency import key64
from kvevents_service.errors import ConfigError
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents_service.wire.media import canonical_medium

TYPES: Final[dict[str, type[Event]]] = {
    "stored": BlockStored,
    "removed": BlockRemoved,
    "cleared": AllBlocksCleared,
}
MAX_PROMPT_TOKENS: Final = 10_000_000


class PrefixWatch:
    """Knows which blocks hold the beginning of one prompt, from the stores that it is shown, in order."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._ends: dict[tuple[str, int, int], int] = {}

    def __repr__(self) -> str:
        return f"<PrefixWatch of {len(self._tokens)} tokens, {len(self._ends)} blocks>"

    def concerns(self, label: str, event: Event) -> bool:
        """A store of the prefix, the removal of a block of it, or a clear."""
        match event:
            case BlockStored():
                return self._stored(label, event)
            case BlockRemoved():
                group = event.group_idx or 0
                return any((label, group, key64(name)) in self._ends for name in event.block_hashes)
            case _:
                return True

    def _stored(self, label: str, event: BlockStored) -> bool:
        group, start = event.group_idx or 0, 0
        if event.parent_block_hash is not None:
            start = self._ends.get((label, group, key64(event.parent_block_hash)), -1)
        if start < 0:
            return False
        size, matched = event.block_size, 0
        for place, name in enumerate(event.block_hashes):
            own = event.token_ids[place * size : (place + 1) * size]
            end = start + (place + 1) * size
            if not own or own != self._tokens[end - size : end]:
                break
            self._ends[label, group, key64(name)] = end
            matched += 1
        return matched > 0


class Filter(NamedTuple):
    """Which events are shown; empty means all. A clear is of every medium, group and prefix.

    loras: adapters by name, "" for the base model; removals say none, so they are not shown then.
    since: nothing of smaller numbers.
    """

    types: tuple[type[Event], ...] = ()
    media: frozenset[str] = frozenset()
    groups: frozenset[int] = frozenset()
    loras: frozenset[str] = frozenset()
    since: int = 0
    prefix: PrefixWatch | None = None

    @property
    def skips_unknown(self) -> bool:
        """Events of unknown types are left out as well."""
        return bool(self.types or self.prefix)

    def wants(self, event: Event, label: str = "", seq: int = 0) -> bool:
        concerned = self.prefix is None or self.prefix.concerns(label, event)  # it must see every store
        if not concerned or seq < self.since or (self.types and not isinstance(event, self.types)):
            return False
        return isinstance(event, AllBlocksCleared) or self._is_of(event)

    def _is_of(self, event: BlockStored | BlockRemoved) -> bool:
        if self.media and canonical_medium(event.medium) not in self.media:
            return False
        if self.groups and (event.group_idx or 0) not in self.groups:
            return False
        return not self.loras or (isinstance(event, BlockStored) and (event.lora_name or "") in self.loras)


def prompt_tokens(text: str) -> list[int]:
    """Token ids of `1,2,3`, or of a file named as `@FILE`, between commas or white space. ConfigError."""
    try:
        text = Path(text[1:]).read_text() if text.startswith("@") else text
        tokens = [int(word) for word in text.replace(",", " ").split()]
    except (OSError, ValueError) as error:
        raise ConfigError("--prefix-of", f"token ids between commas, or @FILE with them ({error})") from error
    if not 0 < len(tokens) <= MAX_PROMPT_TOKENS:
        raise ConfigError("--prefix-of", f"1 to {MAX_PROMPT_TOKENS} token ids")
    return tokens
