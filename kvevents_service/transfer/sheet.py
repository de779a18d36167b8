"""Sheets: regions that are laid out alike, seen as one tensor, so that one call copies a block of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch


class Sheet(NamedTuple):
    """`blocks` is [blocks, regions, words]; the regions follow each other in a slot, from word `column` on."""

    blocks: torch.Tensor
    column: int

    @property
    def words(self) -> int:
        """Of one block."""
        return self.blocks.shape[1] * self.blocks.shape[2]


def sheets_of(views: Sequence[torch.Tensor]) -> list[Sheet]:
    """Views [blocks, words] of regions, in order, gathered as far as they are alike and one pitch apart."""
    sheets, column = [], 0
    for alike in _alike(views):
        sheets.append(Sheet(_joined(alike), column))
        column += sheets[-1].words
    return sheets


def _alike(views: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    group = [views[0]]
    for view in views[1:]:
        if not _continues(group, view):
            yield group
            group = []
        group.append(view)
    yield group


def _continues(group: list[torch.Tensor], view: torch.Tensor) -> bool:
    first, last = group[0], group[-1]
    same_memory = first.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    if not same_memory or (first.shape, first.stride()) != (view.shape, view.stride()):
        return False
    pitch = view.storage_offset() - last.storage_offset()
    return pitch > 0 and (len(group) == 1 or pitch == group[1].storage_offset() - first.storage_offset())


def _joined(alike: list[torch.Tensor]) -> torch.Tensor:
    first = alike[0]
    pitch = alike[1].storage_offset() - first.storage_offset() if len(alike) > 1 else first.shape[1]
    shape, stride = (first.shape[0], len(alike), first.shape[1]), (first.stride(0), pitch, 1)
    return torch.as_strided(first, shape, stride, first.storage_offset())
