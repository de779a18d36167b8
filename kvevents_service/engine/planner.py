"""The eager planner: confirmed blocks of running requests are offered in the next step, each once.

For each request and group a cursor says what was offered. It goes back to the start when a step was lost or
declined, when a new sidecar comes, and when the request is preempted: a block that the tier has costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import NamedTuple

from kvevents_service.core.groups import PREFIX_KINDS, STATE_KIND, WINDOWED, first_needed
from kvevents_service.engine.identity import KeyWalk
from kvevents_service.engine.offers import OfferBook
from kvevents_service.engine.plan import Draft, Patience, Planner, Tables
from kvevents_service.engine.spans import RequestView, Spans, dense_runs
from kvevents_service.wire.control import GroupSpec

Find = Callable[[int, bytes], int | None]
"""The engine's prefix cache: group index and block hash to the block that holds it now.

Only a block whose bytes are there: an engine that names blocks before they are computed, as vLLM does, must leave
out those that a running step is to write.
"""


class State(NamedTuple):
    """A state that was handed over: that of a group after so many tokens."""

    group: int
    tokens: int


class Attempt:
    """How a request's offers fare: all that is kept of one that is gone. `lives` rises when its cursors go back."""

    __slots__ = ("lives", "patience")

    def __init__(self) -> None:
        self.lives = 0
        self.patience = Patience()

    def __repr__(self) -> str:
        return f"<Attempt {self.lives}>"


class Track:
    """A scheduled request: `offered` counts logical blocks a group."""

    __slots__ = (
        "attempt",
        "computed",
        "confirmed",
        "ending",
        "offered",
        "states",
        "tables",
        "unsent",
        "view",
        "walks",
    )

    def __init__(self, view: RequestView, tables: Tables, spans: Sequence[Spans]) -> None:
        self.view = view
        self.tables = tables
        self.walks = [KeyWalk(view.identity, each.block_size) for each in spans]
        self.offered = [0] * len(spans)
        self.confirmed = self.computed = 0
        self.ending = False
        self.states: list[State] = []
        self.unsent: list[State] = []
        self.attempt = Attempt()

    def __repr__(self) -> str:
        return f"<Track {self.view.request_id} {self.confirmed} tokens, offered {self.offered}>"

    def confirm(self, tokens: int, computed: int) -> None:
        self.confirmed = max(self.confirmed, tokens)
        self.computed = max(self.computed, computed, tokens)

    def claim(self) -> EagerClaim:
        """For what is offered of it now."""
        return EagerClaim(self.view.request_id, self.attempt, self.attempt.lives)

    def rewind(self) -> None:
        """Offer everything again. Not if it is ending: what was offered may be freed."""
        self.attempt.lives += 1
        if self.ending:
            return
        self.offered = [0] * len(self.offered)
        self.unsent = list(self.states)


class EagerClaim(NamedTuple):
    """A request, and the life in which it was offered. Its buffers are not kept for it."""

    request_id: str
    attempt: Attempt
    life: int


class EagerPlanner(Planner[EagerClaim]):
    """`groups` and `hash_tokens` as in the engine's layout.

    With `find` blocks that a window has left are looked for in the prefix cache, by name: those that left it before
    they were offered, and what the cache retains of it. What the block table says of them is not trusted.

    lent: a request that runs lends its blocks for the copies of them, so that the book need not touch them. The
    engine tells the book before a request lets go of any. Not with `find`.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        hash_tokens: int,
        book: OfferBook,
        find: Find | None = None,
        *,
        lent: bool = False,
    ) -> None:
        super().__init__(book)
        self.spans = [Spans(group, hash_tokens) for group in groups]
        self._positional = [each for each in self.spans if each.group.cacheable and each.group.kind != STATE_KIND]
        self._grain = gcd(*(each.block_size for each in self.spans if each.group.cacheable)) or 1
        self._find = find
        self._lent = lent and find is None
        self._tracks: dict[str, Track] = {}
        self._due: dict[str, Track] = {}

    def __repr__(self) -> str:
        return f"<EagerPlanner {len(self._tracks)} requests, {len(self._due)} due, {self.book!r}>"

    # a request's life

    def admit(self, view: RequestView, tables: Tables) -> None:
        self._tracks[view.request_id] = Track(view, tables, self.spans)
        self._due.pop(view.request_id, None)

    def confirm(self, request_id: str, tokens: int, computed: int = 0) -> None:
        track = self._tracks.get(request_id)
        if track is not None:
            if tokens // self._grain > track.confirmed // self._grain:
                self._due[request_id] = track
            track.confirm(tokens, computed)

    def hand_off(self, request_id: str, group: int, boundary_tokens: int, block_id: int) -> None:
        track, spans = self._tracks.get(request_id), self.spans[group]
        has_a_name = boundary_tokens > 0 and not boundary_tokens % spans.unit_tokens
        if track is None or not has_a_name or not spans.group.cacheable:
            self.counts.dropped_hand_offs += 1
            return
        state = State(group, boundary_tokens)
        track.states.append(state)
        draft: Draft[EagerClaim] = Draft(self.book.room)
        if boundary_tokens <= track.confirmed and self._add_state(draft, track, state, block_id):
            draft.claims.append(track.claim())
            self._keep(draft)
        else:
            track.unsent.append(state)
            self._due[request_id] = track

    def preempt(self, request_id: str) -> None:
        super().preempt(request_id)
        self._forget(request_id)

    def ending(self, request_id: str) -> Sequence[int] | None:
        track = self._tracks.get(request_id)
        if track is None:
            return None
        self._due.pop(request_id, None)
        track.ending = True
        return track.offered

    def finish(self, request_id: str, tokens: int = 0, computed: int = 0, held: Sequence[int] = ()) -> int:
        super().finish(request_id)
        track = self._forget(request_id)
        if track is None:
            return 0
        track.confirm(tokens, computed)
        track.ending = True
        if not self._has_more(track):
            return 0
        draft: Draft[EagerClaim] = Draft(self.book.room)
        self.counts.skipped += self._add(draft, track)
        for spans in self._positional:
            self._add_tail(draft, track, spans)
        return self._keep(draft, held)

    def _has_more(self, track: Track) -> bool:
        """Something of it may not have been offered yet."""
        if track.unsent or track.view.fine_tokens:
            return True
        return any(
            track.confirmed >= (track.offered[spans.group.index] + 1) * spans.block_size
            for spans in self._positional
        )

    def _add_tail(self, draft: Draft[EagerClaim], track: Track, spans: Spans) -> None:
        """The block that the prompt ended in, if nothing has filled it since."""
        tokens, table = track.view.fine_tokens, track.tables[spans.group.index]
        number, inside = divmod(tokens, spans.block_size)
        is_tail = inside and tokens <= track.confirmed < (number + 1) * spans.block_size
        block_id = table[number] if is_tail and number < len(table) else None
        if block_id is not None and draft.room > 0 and spans.group.kind in PREFIX_KINDS:
            draft.add(track.view.later(partial(spans.tail, track.view, tokens, block_id)), [block_id])

    def _forget(self, request_id: str) -> Track | None:
        self._due.pop(request_id, None)
        return self._tracks.pop(request_id, None)

    def _keep(self, draft: Draft[EagerClaim], held: Sequence[int] = ()) -> int:
        """Hold what the next step will offer although its request may be gone by then.

        Returns how many of `held`, from the first one on, the book gives back from here on: all it keeps, or none.
        """
        if not draft.makers:
            return 0
        blocks = len(draft.block_ids)
        taken = draft.block_ids == held[:blocks]
        self.book.keep(draft.block_ids, held=taken)
        self._kept.makers += draft.makers
        self._kept.block_ids += draft.block_ids
        self._kept.claims += draft.claims
        return blocks if taken else 0

    # steps

    @property
    def idle(self) -> bool:
        return not self._due and super().idle

    def _collect(self, draft: Draft[EagerClaim]) -> None:
        due, self._due = self._due, {}
        for request_id, track in due.items():
            if draft.room <= 0 or track.attempt.patience.rests(self._plans) or self._add(draft, track):
                self._due[request_id] = track

    def _add(self, draft: Draft[EagerClaim], track: Track) -> int:
        """Offer what is due of a request; returns how many logical blocks did not fit."""
        before = len(draft.makers)
        left = sum(self._add_group(draft, track, spans) for spans in self._positional)
        unsent, track.unsent = track.unsent, []
        for state in unsent:
            if not self._add_found(draft, track, state):
                track.unsent.append(state)
        if len(draft.makers) > before:
            draft.claims.append(track.claim())
        return left + len(track.unsent)

    def _add_group(self, draft: Draft[EagerClaim], track: Track, spans: Spans) -> int:
        index, view = spans.group.index, track.view
        start, table = track.offered[index], track.tables[index]
        confirmed = spans.full(track.confirmed)
        stop = min(confirmed, len(table), spans.named(view.unit_hashes), start + draft.room)
        if stop > start:
            track.offered[index] = stop
            lender = view.request_id if self._lent and not (track.ending or view.rewritten) else None
            for first, block_ids in dense_runs(self._blocks(track, spans, start, stop), start):
                make = view.later(partial(spans.offer, view, track.walks[index], first, block_ids))
                draft.add(make, block_ids, lender)
        return confirmed - track.offered[index]

    def _blocks(self, track: Track, spans: Spans, start: int, stop: int) -> Sequence[int | None]:
        """Blocks [start, stop) of a table. Those that the window has left may hold anything by now: ask by name."""
        group, blocks = spans.group, track.tables[spans.group.index][start:stop]
        if self._find is None or group.kind not in WINDOWED:
            return blocks
        kept = first_needed(group, track.computed) // spans.block_size
        names = spans.hashes(track.view.unit_hashes, start, stop)
        return [
            self._recover(group.index, name) if block is None or number < kept else block
            for number, (block, name) in enumerate(zip(blocks, names, strict=True), start)
        ]

    def _add_state(self, draft: Draft[EagerClaim], track: Track, state: State, block_id: int) -> bool:
        spans = self.spans[state.group]
        if draft.room <= 0 or state.tokens > len(track.view.unit_hashes) * spans.unit_tokens:
            return False
        number, inside = divmod(state.tokens, spans.block_size)
        if inside:
            make = partial(spans.tail, track.view, state.tokens, block_id)
        else:
            make = partial(spans.offer, track.view, track.walks[state.group], number - 1, [block_id])
        draft.add(track.view.later(make), [block_id])
        return True

    def _add_found(self, draft: Draft[EagerClaim], track: Track, state: State) -> bool:
        """Offer a state that was handed over before, if the prefix cache has it still. False: it may fit later."""
        spans, hashes = self.spans[state.group], track.view.unit_hashes
        if state.tokens > min(len(hashes) * spans.unit_tokens, track.confirmed):
            return False
        block_id = self._recover(state.group, hashes[state.tokens // spans.unit_tokens - 1])
        return block_id is None or self._add_state(draft, track, state, block_id)

    def _recover(self, group: int, name: bytes) -> int | None:
        block_id = None if self._find is None else self._find(group, name)
        self.counts.recovered += block_id is not None
        return block_id

    # what became of steps

    def _lose(self, claims: Sequence[EagerClaim]) -> None:
        super()._lose(claims)
        for request_id, attempt, life in claims:
            if attempt.lives == life:
                attempt.patience.lose(self._plans)
                track = self._tracks.get(request_id)
                if track is not None and track.attempt is attempt:
                    self._rewind(track)

    def _win(self, claims: Sequence[EagerClaim]) -> None:
        for _, attempt, life in claims:
            if attempt.lives == life:
                attempt.patience.recover()

    def _rewind(self, track: Track) -> None:
        track.rewind()
        if not track.ending:
            self._due[track.view.request_id] = track

    def offer_all_again(self) -> None:
        for track in self._tracks.values():
            track.attempt.patience.recover()
            self._rewind(track)

    def reset(self) -> None:
        """Running requests are not offered until they are admitted again."""
        super().reset()
        self._tracks.clear()
        self._due.clear()
