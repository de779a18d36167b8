"""What tells equal token ids apart, and how an event says it: the extra keys of a block.

The shapes and their order are those that vLLM 0.33 publishes (`to_event_extra_keys`): the adapter's name on every
block, (identifier, offset) of every multimodal item that reaches into the block, the salt on the first block, the
digest of the block's prompt embeddings. An offset counts from the block's first token: negative if the item began
before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

BlockKeys = tuple[str | bytes | tuple[str, int], ...] | None


class MediaItem(NamedTuple):
    """An image, a sound: `length` placeholder tokens from token `offset` of the prompt on."""

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Identity(NamedTuple):
    """An adapter, a salt, multimodal items in order of their offset, and the digests of prompt embeddings.

    `embeds` gives the digest of the embeddings of tokens [start, stop); None: the prompt is of tokens.
    """

    lora_id: int | None = None
    lora_name: str | None = None
    salt: str | None = None
    media: tuple[MediaItem, ...] = ()
    embeds: Callable[[int, int], bytes] | None = None


PLAIN = Identity()
"""A request of tokens alone."""


class KeyWalk:
    """The extra keys of one request's blocks in one group, asked for front to back.

    A walk over a prompt costs O(blocks + items); going back is allowed, and starts over at the first item.
    """

    __slots__ = ("_at", "_block_size", "_embeds", "_item", "_lora", "_media", "_plain", "_salt")

    def __init__(self, identity: Identity, block_size: int) -> None:
        self._block_size = block_size
        self._lora: tuple[str, ...] = (identity.lora_name,) if identity.lora_name else ()
        self._salt = identity.salt
        self._media = identity.media
        self._embeds = identity.embeds
        self._plain = identity is PLAIN
        self._item = self._at = 0

    def __repr__(self) -> str:
        return f"<KeyWalk item {self._item}/{len(self._media)} at token {self._at}>"

    def keys(self, first: int, stop: int) -> list[BlockKeys] | None:
        """One entry for each of blocks [first, stop); None if no block has any."""
        if self._plain:
            return None
        entries: list[BlockKeys]
        if self._media or self._embeds is not None:
            entries = [self._block(block * self._block_size) for block in range(first, stop)]
        else:
            entries = [self._lora or None] * (stop - first)
            if self._salt and first == 0 < stop:
                entries[0] = (*self._lora, self._salt)
        return entries if any(entries) else None

    def _block(self, start: int) -> BlockKeys:
        stop = start + self._block_size
        salt = (self._salt,) if self._salt and not start else ()
        digest = () if self._embeds is None else (self._embeds(start, stop),)
        return (*self._lora, *self._items(start, stop), *salt, *digest) or None

    def _items(self, start: int, stop: int) -> list[tuple[str, int]]:
        """Items that reach into tokens [start, stop). The cursor rests on the first one that may reach further."""
        media, found = self._media, list[tuple[str, int]]()
        if not media or media[-1].end <= start:
            return found
        at = self._item if start >= self._at else 0
        while at < len(media) and media[at].offset < stop:
            item = media[at]
            if item.end > start:
                found.append((item.identifier, item.offset - start))
                if item.end > stop:
                    break
            at += 1
        self._item, self._at = at, stop
        return found
