"""The models that the reference engine can stand for: their KV cache groups and their requests' identities."""

from __future__ import annotations

from typing import NamedTuple

from kvevents_service.engine.identity import PLAIN, Identity, MediaItem
from kvevents_service.engine.trace import TraceLine
from kvevents_service.wire.control import GroupSpec

ADAPTERS: tuple[tuple[int | None, str | None, str | None], ...] = (
    (1, "adapter-a", None),
    (None, None, "tenant-1"),
    (2, "adapter-b", "tenant-2"),
    (None, None, None),
)
IMAGES = ((512, 300), (812, 212))
"""Where the images of a prompt lie, (offset, length) in tokens: all of the trace's second block."""


class Model(NamedTuple):
    """The groups of a model; hashes come in units of `hash_tokens`. `mixed`: some requests have identities."""

    name: str
    groups: tuple[GroupSpec, ...]
    hash_tokens: int
    mixed: bool = False

    def identity_of(self, line: TraceLine) -> Identity:
        """The identity of a request: adapter and salt are the same for every turn of one conversation.

        Where a prompt has images they lie on its second block, and nothing else tells it from another such prompt.
        """
        if not self.mixed or len(line.hash_ids) < 2:
            return PLAIN
        which = line.hash_ids[1]
        lora_id, lora_name, salt = ADAPTERS[which % len(ADAPTERS)]
        return Identity(lora_id, lora_name, salt, _images(which) if self._has_images(line) else ())

    def _has_images(self, line: TraceLine) -> bool:
        offset, length = IMAGES[-1]
        return line.hash_ids[1] % 3 == 0 and line.input_length > offset + length


def _images(which: int) -> tuple[MediaItem, ...]:
    return tuple(MediaItem(f"image-{which}-{place}", *span) for place, span in enumerate(IMAGES))


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
