"""What the reference engine keeps of a request while it runs, and what it counts over all of them."""

from __future__ import annotations

import msgspec

from kvevents_service.engine.block_tables import GroupTable
from kvevents_service.engine.client import PrefixHit
from kvevents_service.engine.model import Model
from kvevents_service.engine.spans import RequestView
from kvevents_service.engine.trace import TraceLine, chain_hashes, derived_tokens, prompt_tokens, show_images


class EngineCounts(msgspec.Struct):
    """What the engine did so far. Every request of the trace before number `low_water` is finished."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    local_hit_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    blocks_offered: int = 0
    blocks_stored: int = 0
    blocks_recovered: int = 0
    blocks_undescribed: int = 0
    offers_skipped: int = 0
    loads_failed: int = 0
    bytes_moved: int = 0
    bytes_verified: int = 0
    corrupt_blocks: int = 0
    registrations: int = 0
    low_water: int = 0
    done: bool = False


class Request:
    """One request: tokens and hashes grow, the block tables follow, `computed` counts tokens with KV."""

    def __init__(self, number: int, line: TraceLine, model: Model) -> None:
        self.number = number
        self.request_id = f"req-{number}"
        self.seed = 1_000_000_007 + number
        self.model = model
        self.identity = model.identity_of(line)
        self.tokens = prompt_tokens(line)
        show_images(self.tokens, self.identity.media)
        self.prompt_length = len(self.tokens)
        self.final_length = self.prompt_length + line.output_length
        self.hashes: list[bytes] = []
        self._hash_tokens()
        self.view = RequestView(self.request_id, self.hashes, self.tokens, self.identity)
        self.reset()

    def __repr__(self) -> str:
        return f"<Request {self.request_id} {self.computed}/{self.final_length} {self.tables}>"

    def reset(self) -> None:
        """It has no blocks: new, or preempted."""
        self.tables = [GroupTable(group, self.model.hash_tokens) for group in self.model.groups]
        self.computed = 0
        self.hit = PrefixHit(0)
        self.hit_start = 0

    def grow(self, count: int) -> None:
        """`count` more tokens were generated."""
        self.tokens += derived_tokens(self.seed + len(self.tokens), count)
        self._hash_tokens()

    def _hash_tokens(self) -> None:
        self.hashes += chain_hashes(self.tokens, self.model.hash_tokens, self.hashes, self.identity)

    def held(self) -> list[int]:
        """Every block of the request, last ones first: that is the order they should be reused in."""
        return [block for table in self.tables for block in reversed(table.held())]
