"""Settings of a source: an engine's own stream that is relayed. One table of `[[sources]]`."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from kvevents_service.errors import expect
from kvevents_service.sockets import port_above

ENGINES: Final = ("vllm", "sglang", "tensorrt-llm")
SCHEMES: Final = ("tcp://", "ipc://")
MAX_RANK: Final = (1 << 31) - 1
MAX_RANKS: Final = 1024
_RANGE: Final = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)


class SourceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine publishes.

    endpoint, replay: as the engine was told. topic: exactly this one; "": the first that comes.
    dp_rank: whose events they are. A range as "0-3" stands for one source a rank, on the ports that vLLM gives
        them: the rank is added to both. Events that say another rank are left out.
    block_size: tokens of a block, where the engine also announces hashes inside blocks. 0: any size is a block's.
    stale_after_s: without a message for so long, heartbeats included, it counts as gone.
    engine, model: for people.
    record: a new file for its raw messages, of a range one for each rank; redact: without tokens and extra keys.
    input: such a file in the place of an endpoint, at `speed` times its own speed.
    """

    endpoint: str = ""
    replay: str | None = None
    topic: str = ""
    dp_rank: int | str = 0
    engine: str = "vllm"
    model: str = ""
    block_size: int = 0
    stale_after_s: float | None = None
    record: str | None = None
    redact: bool = False
    input: str | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        self._check_input()
        expect(self.engine in ENGINES, "engine", f"one of {', '.join(ENGINES)}")
        expect(0 <= self.block_size <= 65536, "block_size", "tokens from 1 to 65536; 0 is unsaid")
        stale = self.stale_after_s is None or 0 < self.stale_after_s < float("inf")
        expect(stale, "stale_after_s", "a positive number of seconds")
        for setting, endpoint in (("endpoint", self.endpoint or None), ("replay", self.replay)):
            good = endpoint is None or (endpoint.startswith(SCHEMES) and "\0" not in endpoint)
            expect(good, setting, f"an endpoint that starts with {' or '.join(SCHEMES)}")
        expect(len(self.topic.encode(errors="replace")) <= 512, "topic", "at most 512 bytes of UTF-8")
        self._check_ranks()

    def _check_input(self) -> None:
        expect(bool(self.endpoint) != bool(self.input), "endpoint", "one, or an input in its place")
        expect(self.record is None or not self.input, "record", "an endpoint to record")
        expect(not self.redact or self.record is not None, "redact", "a file to record to")
        expect(0 < self.speed < float("inf"), "speed", "a positive number")
        expect(self.input is None or isinstance(self.dp_rank, int), "dp_rank", "one rank, as there is one input")

    def _check_ranks(self) -> None:
        expected = f"a rank from 0 to {MAX_RANK}, or a range of at most {MAX_RANKS} as 0-3"
        if isinstance(self.dp_rank, int):
            expect(0 <= self.dp_rank <= MAX_RANK, "dp_rank", expected)
            return
        ranks = self.ranks
        expect(0 < len(ranks) <= MAX_RANKS, "dp_rank", expected)
        for setting, endpoint in (("endpoint", self.endpoint), ("replay", self.replay)):
            fits = endpoint is None or port_above(endpoint, ranks[-1]) is not None
            expect(fits, setting, f"tcp://HOST:PORT, as dp_rank is a range, with PORT + {ranks[-1]} below 65536")

    @property
    def ranks(self) -> range:
        """Of a range that is none: empty."""
        if isinstance(self.dp_rank, int):
            return range(self.dp_rank, self.dp_rank + 1)
        match = _RANGE.fullmatch(self.dp_rank)
        return range(int(match[1]), int(match[2]) + 1) if match else range(0)

    def expanded(self) -> list[tuple[int, SourceConfig]]:
        """Rank and source, for each rank."""
        if isinstance(self.dp_rank, int):
            return [(self.dp_rank, self)]
        return [(rank, self._of_rank(rank)) for rank in self.ranks]

    def _of_rank(self, rank: int) -> SourceConfig:
        replay = None if self.replay is None else port_above(self.replay, rank)
        endpoint = port_above(self.endpoint, rank) or self.endpoint
        record = None if self.record is None else f"{self.record}.{rank}"
        return msgspec.structs.replace(self, dp_rank=rank, endpoint=endpoint, replay=replay, record=record)
