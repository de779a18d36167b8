"""What must agree for the blocks of a kept disk tier to be worth something to an engine."""

from __future__ import annotations

import msgspec

from kvevents_service.wire.control import GroupSpec

VERSION = 1
"""Of the files' own form. It rises when an older reader would misread them."""


class KeptLayout(msgspec.Struct, array_like=True, frozen=True):
    """What the engines said of their blocks, and how the file is cut. Any other value makes what is kept void.

    `sizes` has each rank's bytes of a block in each region; `cut` the slots of the file and each rank's bytes from
    one slot to the next, which the storage fills in.
    """

    namespace: str
    hash_bytes: int
    groups: tuple[GroupSpec, ...]
    hash_tokens: int
    sizes: tuple[tuple[int, ...], ...]
    cut: tuple[int, ...] = ()
    version: int = VERSION
