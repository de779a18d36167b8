"""What turns announcements into a payload: a dialect, the rank and publisher id it is told, what it keeps back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvevents_service.core.announce import encode, encoding_key
from kvevents_service.core.metadata import Announcement, Cleared
from kvevents_service.core.press import Press
from kvevents_service.core.privacy import Privacy
from kvevents_service.core.rows import Row
from kvevents_service.wire.dialects import DIALECTS, Dialect
from kvevents_service.wire.frames import Payload


class Encoding(NamedTuple):
    """One way to write a batch. Outputs whose encodings have one `key` share the bytes."""

    dialect: str = "vllm"
    dp_rank: int = 0
    publisher_id: bytes | None = None
    privacy: Privacy = Privacy()

    @property
    def key(self) -> Hashable:
        """Equal for encodings that write the same bytes."""
        dialect = self._spoken
        sender = self.publisher_id if dialect.publisher_id else None
        return encoding_key(dialect), self.dp_rank, sender, self.privacy.hash_key

    @property
    def _spoken(self) -> Dialect:
        return self.privacy.dialect(DIALECTS[self.dialect])

    def encode(self, announcements: Sequence[Announcement], ts: float) -> bytes:
        """The payload of a batch; `ts` in seconds since the epoch. WireError if it is too large for a reader."""
        shown = self.privacy.outward(announcements)
        return encode(self._spoken, shown, ts, self.dp_rank, self.publisher_id)

    def press(self, rows: Sequence[Row], ts: float, press: Press, *, clear: bool) -> Payload:
        """The same of a part of a state, behind a clear or not: longer, and made many times as fast."""
        if self._spoken.one_hash:
            runs = (run for row in rows for run in row.runs)
            return self.encode((*[Cleared()] * clear, *runs), ts)
        shown = [self.privacy.row(row) for row in rows]
        return press.batch(self._spoken, shown, self.encode((), ts), clear=clear)
