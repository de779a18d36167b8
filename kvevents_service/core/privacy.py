"""What an output keeps from its readers: token ids, and the engine's own block hashes.

Both are applied where a batch is encoded, so live batches, replays and snapshots of an output agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from kvevents_service.core.metadata import Announcement, BlockStoreMeta, RemovedRun
from kvevents_service.core.rows import Row
from kvevents_service.wire.dialects import Dialect

MIN_SALT_BYTES: Final = 16
KEY_BYTES: Final = 32


class Privacy(NamedTuple):
    """redact_tokens: stores have no token ids and no extra keys. hash_key: block hashes are mapped one way."""

    redact_tokens: bool = False
    hash_key: bytes | None = None

    def __repr__(self) -> str:
        return f"<Privacy redact_tokens={self.redact_tokens} hash_key={self.hash_key is not None}>"

    def dialect(self, spoken: Dialect) -> Dialect:
        """The dialect that is really written."""
        return redacted(spoken) if self.redact_tokens else spoken

    def outward(self, announcements: Sequence[Announcement]) -> Sequence[Announcement]:
        """The announcements with the hashes that readers see."""
        if self.hash_key is None:
            return announcements
        return [_renamed(item, self.hash_key) for item in announcements]

    def row(self, row: Row) -> Row:
        """Likewise."""
        if self.hash_key is None:
            return row
        return Row([_renamed_run(run, self.hash_key) for run in row.runs], row.blocks)


def key_of(salt: bytes) -> bytes:
    """The key that a salt of any length stands for."""
    return blake2b(salt, digest_size=KEY_BYTES).digest()


@lru_cache(maxsize=64)
def redacted(dialect: Dialect) -> Dialect:
    """The dialect without token ids and extra keys: these hold users' salts, and what images hash to."""
    return msgspec.structs.replace(dialect, tokens=False)


def mapped(digest: bytes, key: bytes) -> bytes:
    """A digest's name outside, as long as the digest (8 to 64 bytes): keyed BLAKE2b, RFC 7693."""
    return blake2b(digest, digest_size=len(digest), key=key).digest()


def _renamed(item: Announcement, key: bytes) -> Announcement:
    if isinstance(item, RemovedRun):
        return msgspec.structs.replace(item, block_hashes=tuple(mapped(name, key) for name in item.block_hashes))
    return _renamed_run(item, key) if isinstance(item, BlockStoreMeta) else item


def _renamed_run(run: BlockStoreMeta, key: bytes) -> BlockStoreMeta:
    parent = run.parent_block_hash
    return msgspec.structs.replace(
        run,
        block_hashes=b"".join(mapped(run.hash_at(place), key) for place in range(run.blocks)),
        parent_block_hash=None if parent is None else mapped(parent, key),
    )
