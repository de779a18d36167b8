"""Rows: runs that continue each other, as a state tells them. What was stored step by step becomes one event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvevents_service.core.metadata import Announcement, BlockStoreMeta


def rows_of(announcements: Iterable[Announcement]) -> Iterator[list[Announcement]]:
    """All of them, in order: stores that continue each other together, everything else by itself."""
    row: list[Announcement] = []
    for item in announcements:
        if row and not _continues(item, row[-1]):
            yield row
            row = []
        row.append(item)
    if row:
        yield row


def _continues(item: Announcement, before: Announcement) -> bool:
    """Whether it is the next blocks of the run before it, alike in all that an event says once."""
    if not isinstance(item, BlockStoreMeta) or not isinstance(before, BlockStoreMeta):
        return False
    return (
        item.parent_block_hash is not None
        and item.parent_block_hash == before.block_hashes[-before.hash_bytes :]
        and item.hash_bytes == before.hash_bytes
        and item.group == before.group
        and item.medium == before.medium
        and (item.lora_name, item.lora_id) == (before.lora_name, before.lora_id)
        and (item.extra_keys is None) == (before.extra_keys is None)
        and not (item.inner or before.inner)
    )


def head_of(row: list[Announcement]) -> Announcement:
    """The first of a row, with the extra keys of all."""
    first = row[0]
    if not isinstance(first, BlockStoreMeta) or first.extra_keys is None or len(row) == 1:
        return first
    runs = (run for run in row if isinstance(run, BlockStoreMeta))
    return msgspec.structs.replace(first, extra_keys=[entry for run in runs for entry in run.extra_keys or ()])
