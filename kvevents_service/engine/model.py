"""The models that the reference engine can stand for: their KV cache groups and their requests' identities."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvevents_service.engine.trace import TraceLine
from kvevents_service.wire.control import GroupSpec


class Identity(NamedTuple):
    """What tells equal token ids apart: an adapter, and a salt that the first block carries."""

    lora_id: int | None = None
    lora_name: str | None = None
    salt: str | None = None

    @property
    def root(self) -> bytes:
        """What the first hash of a chain starts from; empty for a plain request."""
        return "/".join(filter(None, (self.lora_name, self.salt))).encode()

    def extra_keys(self, start: int, stop: int) -> list[tuple[Any, ...] | None] | None:
        """One entry for each of blocks [start, stop), as vLLM publishes them; None if none has any."""
        if self.lora_name is None and self.salt is None:
            return None
        lora = () if self.lora_name is None else (self.lora_name,)
        salt = () if self.salt is None else (self.salt,)
        return [((*lora, *salt) if block == 0 else lora) or None for block in range(start, stop)]


class Model(NamedTuple):
    """The groups of a model; hashes come in units of `hash_tokens`. `mixed`: some requests have identities."""

    name: str
    groups: tuple[GroupSpec, ...]
    hash_tokens: int
    mixed: bool = False

    def identity_of(self, line: TraceLine) -> Identity:
        """The identity of a request, the same for every turn of one conversation."""
        if not self.mixed or len(line.hash_ids) < 2:
            return Identity()
        match line.hash_ids[1] % 4:
            case 0:
                return Identity(1, "adapter-a")
            case 1:
                return Identity(salt="tenant-1")
            case 2:
                return Identity(2, "adapter-b", "tenant-2")
            case _:
                return Identity()


MODELS = {
    model.name: model
    for model in (
        Model("full", (GroupSpec(0, "full_attention", 16),), 16),
        Model(
            "hybrid",
            (
                GroupSpec(0, "full_attention", 16),
                GroupSpec(1, "sliding_window", 32, 256),
                GroupSpec(2, "mamba", 128),
            ),
            16,
            mixed=True,
        ),
    )
}
