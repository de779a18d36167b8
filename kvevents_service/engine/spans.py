"""What an engine knows of a request, and any range of its blocks said as an offer.

Logical block i of a group holds tokens [i * block_size, (i + 1) * block_size). It spans k hash units, and is named
by the hash of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

from kvevents_service.core.groups import FINE_KINDS
from kvevents_service.engine.identity import PLAIN, Identity, KeyWalk
from kvevents_service.engine.offers import make_offer
from kvevents_service.wire.control import GroupSpec, InnerHash, Offer


class RequestView(NamedTuple):
    """A request's own buffers, never copied: the engine appends to them, and what was there stays as it is.

    rewritten: but for this one, whose engine may also write them anew: offers of it are made at once.
    owner: whom the buffers belong to; not let go of before them.
    fine_tokens: where a hit of the same prompt should end although it may be inside a block; whole hash units, for
    the engine the last ones of a prompt that leave it a token to compute. 0: its hits end where blocks do.
    """

    request_id: str
    unit_hashes: Sequence[bytes]
    token_ids: Sequence[int]
    identity: Identity = PLAIN
    fine_tokens: int = 0
    owner: object = None
    rewritten: bool = False

    def later(self, make: Callable[[], Offer]) -> Callable[[], Offer]:
        """To be called when it suits: what it makes then is what it would make now."""
        if not self.rewritten:
            return make
        made = make()
        return lambda: made


class Spans:
    """Ranges of one group's logical blocks. `units`: hash units a block, of `unit_tokens` each."""

    __slots__ = ("block_size", "group", "unit_tokens", "units")

    def __init__(self, group: GroupSpec, hash_tokens: int) -> None:
        self.group = group
        self.block_size = group.block_size
        self.unit_tokens = hash_tokens
        self.units = group.block_size // hash_tokens

    def __repr__(self) -> str:
        return f"<Spans {self.group.kind} of {self.block_size} tokens>"

    def full(self, tokens: int) -> int:
        """How many blocks so many tokens fill."""
        return tokens // self.block_size

    def named(self, unit_hashes: Sequence[bytes]) -> int:
        """How many blocks have a name."""
        return len(unit_hashes) // self.units

    def hashes(self, unit_hashes: Sequence[bytes], first: int, stop: int) -> Sequence[bytes]:
        """The names of blocks [first, stop)."""
        return unit_hashes[(first + 1) * self.units - 1 : stop * self.units : self.units]

    def name(self, unit_hashes: Sequence[bytes], block: int) -> bytes:
        """The name of one block."""
        return unit_hashes[(block + 1) * self.units - 1]

    def parent(self, unit_hashes: Sequence[bytes], first: int) -> bytes | None:
        """The hash before block `first`."""
        return unit_hashes[first * self.units - 1] if first else None

    def offer(self, view: RequestView, walk: KeyWalk, first: int, block_ids: Sequence[int]) -> Offer:
        """Consecutive blocks from `first` on, in these blocks of the engine; a prefix inside one is named."""
        stop = first + len(block_ids)
        identity = view.identity
        return make_offer(
            view.request_id,
            self.hashes(view.unit_hashes, first, stop),
            view.token_ids[first * self.block_size : stop * self.block_size],
            block_ids,
            group=self.group.index,
            parent=self.parent(view.unit_hashes, first),
            lora_id=identity.lora_id,
            lora_name=identity.lora_name,
            extra_keys=walk.keys(first, stop),
            inner=self._inner(view, view.fine_tokens, first, stop),
        )

    def tail(self, view: RequestView, tokens: int, block_id: int) -> Offer:
        """The block that a prefix of `tokens` ends in, filled up to there; not at a block's end."""
        first, identity = tokens // self.block_size, view.identity
        return make_offer(
            view.request_id,
            (),
            view.token_ids[first * self.block_size : tokens],
            [block_id],
            group=self.group.index,
            parent=self.parent(view.unit_hashes, first),
            lora_id=identity.lora_id,
            lora_name=identity.lora_name,
            inner=self._inner(view, tokens, first, first + 1),
        )

    def _inner(self, view: RequestView, tokens: int, first: int, stop: int) -> list[InnerHash] | None:
        """The name of a prefix that ends inside one of blocks [first, stop)."""
        block, inside = divmod(tokens, self.block_size)
        if not inside or not first <= block < stop or self.group.kind not in FINE_KINDS:
            return None
        hashes, unit = view.unit_hashes, tokens // self.unit_tokens - 1
        keys = KeyWalk(view.identity, self.unit_tokens).keys(unit, unit + 1)
        parent, units = hashes[unit - 1] if unit else None, inside // self.unit_tokens
        return [InnerHash(block - first, units, hashes[unit], parent, keys[0] if keys else None)]


def dense_runs(blocks: Sequence[int | None], first: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Runs without a null block; `blocks[0]` is logical block `first`. Yields each run's place and block ids."""
    if blocks and None not in blocks:  # nearly always, and at the speed of a search
        yield first, cast(Sequence[int], blocks)
        return
    run: list[int] = []
    for number, block in enumerate(blocks, first):
        if block is not None:
            run.append(block)
        elif run:
            yield number - len(run), run
            run = []
    if run:
        yield first + len(blocks) - len(run), run
