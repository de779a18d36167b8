"""A publisher as the wire knows it: numbers, retained batches, what is resident; no sockets.

`snapshots=True` answers a replay from what is not retained like our sidecar: contiguous from max(start, current -
window + 1), a clear first, then the whole state spread over the numbers, then empty batches. `snapshots=False`
answers like vLLM: with what is retained.
"""

from itertools import count

from kvevents_service.core.residency import Residency
from kvevents_service.wire.codec import encode_batch
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvevents_service.wire.frames import LiveFrame
from kvevents_service.wire.peek import Snapshot

BLOCK_SIZE = 2
PER_BATCH = 1
_lives = count(1)


def stored(block: int, medium: str = "CPU") -> BlockStored:
    """One block without a parent."""
    return BlockStored([block], None, [block] * BLOCK_SIZE, BLOCK_SIZE, None, medium, None)


def removed(block: int, medium: str = "CPU") -> BlockRemoved:
    return BlockRemoved([block], medium)


class ModelPublisher:
    """One life of a publisher. All its payloads differ from those of every other life."""

    def __init__(
        self,
        *,
        snapshots: bool = True,
        retained: int = 100,
        window: int = 10_000,
        first_seq: int = 0,
        publisher_id: bytes | None = None,
        topic: bytes = b"kv",
        dp_rank: int | None = 0,
    ) -> None:
        self.snapshots, self.retained, self.window = snapshots, retained, window
        self.publisher_id, self.topic, self.dp_rank = publisher_id, topic, dp_rank
        self.first_seq = self.next_seq = first_seq
        self.journal: dict[int, LiveFrame] = {}
        self.fold = Residency()
        self._ts = float(next(_lives))

    def frame(self, seq: int, *events: Event) -> LiveFrame:
        batch = EventBatch(self._ts, list(events), self.dp_rank)
        payload = encode_batch(batch)
        if self.publisher_id is not None:
            payload = b"\x94" + payload[1:] + b"\xc4\x10" + self.publisher_id
        return LiveFrame(self.topic, seq, payload)

    def publish(self, *events: Event) -> LiveFrame:
        """Number a batch and keep it."""
        self.fold.apply(events)
        frame = self.journal[self.next_seq] = self.frame(self.next_seq, *events)
        self.journal.pop(self.next_seq - self.retained, None)
        self.next_seq += 1
        return frame

    def reply(self, start: int) -> list[LiveFrame]:
        """The answer to a replay request, without its end marker."""
        kept = [frame for seq, frame in sorted(self.journal.items()) if seq >= start]
        if start >= self.next_seq or not self.snapshots or (kept and kept[0].seq == start):
            return kept
        first = max(start, self.next_seq - self.window)
        told = dict(enumerate(self._pieces(self.next_seq - first), first))
        return [self.frame(seq, *told.get(seq, ())) for seq in range(first, self.next_seq)]

    def snapshot(self) -> Snapshot:
        payloads = tuple(self.frame(0, *events).payload for events in self._pieces(100))
        return Snapshot(self.next_seq - 1, self.publisher_id or b"-" * 16, payloads)

    def _pieces(self, most: int) -> list[list[Event]]:
        """A clear, then the state, in at most so many batches."""
        state = [stored(key, shelf.medium) for shelf, keys in self.fold.shelves.items() for key in keys]
        size = max(PER_BATCH, -(-len(state) // most))
        pieces: list[list[Event]] = [list(state[at : at + size]) for at in range(0, len(state), size)] or [[]]
        return [[AllBlocksCleared(), *pieces[0]], *pieces[1:]]


def blocks_of(fold: Residency) -> dict[object, set[int]]:
    """What is where, without empty shelves."""
    return {shelf: set(keys) for shelf, keys in fold.shelves.items() if keys}
