"""What vLLM's requests say of every block, before any event, and what a resident set can serve."""

from __future__ import annotations

from collections.abc import Callable

from oracle.fold import Block, Key
from oracle.known import Known
from oracle.models import PREFIX, WINDOW, Group, Model, units_inside
from oracle.script import Answer, Op

MEDIUM = "CPU"


def key_of(group: int, block_hash: str) -> Key:
    """Of a hash in full or of its low 64 bits."""
    return Key(MEDIUM, group, block_hash[-16:])


def window_of(group: Group) -> int | None:
    """What vLLM announces as the window: a chunk is none."""
    return group.window if group.kind in WINDOW else None


class Requests:
    """vLLM's own hashes and extra keys, block by block of every group. `fine`: hits may end inside a block."""

    def __init__(self, model: Model, *, fine: bool) -> None:
        self.model = model
        self.fine = fine
        self.truth: dict[Key, Block] = {}
        self.inner: dict[Key, Block] = {}
        self.owners: dict[Key, set[Key]] = {}
        self.adapters: dict[Key, set[int | None]] = {}
        self.known: dict[str, Known] = {}

    def see(self, op: Op, facts: Answer) -> None:
        """Take in what an `add` or a `step` hashed."""
        if op["op"] == "add":
            self.known[op["request"]] = Known(self.model, op["lora"])
            self._grow(op["request"], facts["grown"])
        elif op["op"] == "step":
            for name, news in facts["grown"].items():
                self._grow(name, news)

    def _grow(self, name: str, news: Answer) -> None:
        known = self.known[name]
        before = {group: known.blocks(group.block_size) for group in self.model.stored}
        units = known.blocks(self.model.hash_size)
        known.grow(news)
        for group in self.model.stored:
            for unit in range(units, known.blocks(self.model.hash_size)):
                self._learn_inner(known, group, unit)
        for group, first in before.items():
            for number in range(first, known.blocks(group.block_size)):
                self._learn(known, group, number)

    def _learn_inner(self, known: Known, group: Group, unit: int) -> None:
        """The name of a prefix that ends with this hash unit, inside a block."""
        size, inside = self.model.hash_size, units_inside(group, self.model.hash_size)
        name, parent = known.hash_at((unit + 1) * size), known.hash_at(unit * size)
        if name is None or inside == 1 or not (unit + 1) % inside:
            return
        key = key_of(group.index, name)
        self.inner[key] = Block(
            key, "LOCAL", tuple(known.range_tokens(size, unit)), parent and parent[-16:],
            known.lora_id, known.lora_name, known.extra_keys(size, unit), size, group.kind, window_of(group),
        )  # fmt: skip
        self.adapters.setdefault(key, set()).add(known.lora_id)

    def _learn(self, known: Known, group: Group, number: int) -> None:
        size, parent = group.block_size, known.hash_at(number * group.block_size)
        key = key_of(group.index, known.name(group, number))
        self.truth[key] = Block(
            key, "LOCAL", tuple(known.range_tokens(size, number)), parent and parent[-16:],
            known.lora_id, known.lora_name, known.extra_keys(size, number), size, group.kind, window_of(group),
        )  # fmt: skip
        self.adapters.setdefault(key, set()).add(known.lora_id)
        inside = units_inside(group, self.model.hash_size)
        for unit in range(number * inside + 1, (number + 1) * inside):
            name = known.hash_at(unit * self.model.hash_size)
            self.owners.setdefault(key_of(group.index, name or ""), set()).add(key)

    def renumbered(self, block: Block, other: Block) -> bool:
        """The two differ in nothing but the number of the adapter, and requests used both numbers."""
        same = block._replace(lora_id=other.lora_id) == other
        return same and {block.lora_id, other.lora_id} <= self.adapters.get(block.key, set())

    def servable(self, name: str, local: int, tokens: int, has: Callable[[Key], bool]) -> int:
        """Tokens behind `local` that every group can serve with these blocks; at least one is left to compute."""
        known, step = self.known[name], self.model.alignment
        if local % step:
            return 0
        step = self.model.hash_size if self.fine else step
        last = min(tokens - 1, len(known.hashes) * self.model.hash_size) // self.model.hash_size
        longest = last * self.model.hash_size
        for end in range(longest // step * step, local, -step):
            if all(self._serves(known, group, (local, end, longest), has) for group in self.model.stored):
                return end - local
        return 0

    def _serves(self, known: Known, group: Group, span: tuple[int, int, int], has: Callable[[Key], bool]) -> bool:
        local, end, longest = span
        for number in group.needed(end, local):
            stop = (number + 1) * group.block_size
            whole = stop <= end or (group.kind in PREFIX and stop <= longest)
            names = [known.name(group, number)] if whole else []
            names += [known.hash_at(end) or ""] if stop > end else []
            if not any(has(key_of(group.index, name)) for name in names):
                return False
        return True


def empty(block: Block) -> Block:
    """The block as vLLM announces it where it has no snapshot: place, kind, size and window, and nothing else."""
    return block._replace(tokens=(), parent=None, lora_id=None, lora_name=None, extra_keys=None)
