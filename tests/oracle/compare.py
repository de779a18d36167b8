"""Both sides of a script, block by block after every operation. docs/differences.md argues each kind of difference.

A difference is looked at where it shows, with what both sides are known to hold at that moment, and goes under the
one rule that fits exactly. What no rule fits is unexplained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from oracle.fold import Block, Fold, Key
from oracle.script import Answer, Op, Script

MEDIUM, GROUP = "CPU", 0
ARGUED_OF_VLLM = {
    "stored_twice": "stored_twice",
    "removed_again": "stored_twice",
    "parent_absent": "child_before_parent",
    "cleared": "cleared_by_removals",
}
"""What vLLM's stream does and ours must not."""
ARGUED_OF_OURS = {"many_hashes": "many_hashes_an_event"}
TIER_FULL = {"declined_no_room", "declined_parent_absent"}

KINDS = (
    "many_hashes_an_event",
    "cleared_by_removals",
    "stored_twice",
    "child_before_parent",
    "root_evicted_first",
    "held_for_parent",
    "first_copy_counts",
    "eviction_order",
    "room_for_a_chain",
    "reset_while_pending",
    "reused_id",
    "reused_id_mislabels",
    "renumbered_adapter",
    "load_after_reset",
)


class Verdict(NamedTuple):
    """What came of one script: how many announcements were compared, and every difference by its kind."""

    compared: int
    argued: Counter[str]
    unexplained: list[str]


def key_of(block_hash: str) -> Key:
    return Key(MEDIUM, GROUP, block_hash)


class Requests:
    """What vLLM's requests say of every block: its own hasher and its own extra keys, before any event."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.truth: dict[Key, Block] = {}
        self.adapters: dict[Key, set[int | None]] = {}
        self._lora: dict[str, tuple[int | None, str | None]] = {}
        self._last: dict[str, str | None] = {}

    def see(self, op: Op, facts: Answer) -> None:
        """Take in what an `add` or a `step` hashed."""
        if op["op"] == "add":
            lora = op["lora"] or {"id": None, "name": None}
            self._lora[op["request"]] = (lora["id"], lora["name"])
            self._last[op["request"]] = None
            self._grow(op["request"], facts["grown"])
        elif op["op"] == "step":
            for name, news in facts["grown"].items():
                self._grow(name, news)

    def _grow(self, name: str, news: Answer) -> None:
        size, (lora_id, lora_name) = self.block_size, self._lora[name]
        for place, full_hash in enumerate(news["hashes"]):
            key = key_of(full_hash[-16:])
            tokens = tuple(news["tokens"][place * size : (place + 1) * size])
            self.truth[key] = Block(
                key, "LOCAL", tokens, self._last[name], lora_id, lora_name, news["extra_keys"][place],
                size, "full_attention", None,
            )  # fmt: skip
            self.adapters.setdefault(key, set()).add(lora_id)
            self._last[name] = key.block_hash

    def renumbered(self, block: Block, other: Block) -> bool:
        """The two differ in nothing but the number of the adapter, and requests used both numbers."""
        same = block._replace(lora_id=other.lora_id) == other
        return same and {block.lora_id, other.lora_id} <= self.adapters.get(block.key, set())


class Comparison:
    """Plays both answers of one script side by side."""

    def __init__(self, script: Script) -> None:
        self.vllm, self.ours = Fold(), Fold()
        self.requests = Requests(script["block_size"])
        self.compared = 0
        self.argued: dict[tuple[str, Key], None] = {}
        self.unexplained: list[str] = []
        self.place = ""
        self.pending: dict[str, str] = {}
        self.declined: dict[Key, set[str]] = {}
        self.ever_lost: set[Key] = set()
        self.copying: dict[int, list[str]] = {}
        self.no_room: set[Key] = set()
        self.kept_by_reset: set[Key] = set()
        self.untracked: set[Key] = set()
        self.mislabelled: set[Key] = set()
        self.resets = self.steps = 0
        self._load_resets: dict[str, int] = {}

    def verdict(self) -> Verdict:
        return Verdict(self.compared, Counter(kind for kind, _ in self.argued), self.unexplained)

    def argue(self, kind: str, key: Key) -> None:
        self.argued[kind, key] = None

    def fail(self, what: str) -> None:
        self.unexplained.append(f"{self.place}: {what}")

    def play(self, number: int, op: Op, answer: Answer, result: Answer) -> None:
        """One operation: vLLM's answer and our result."""
        self.place = f"op {number} {op['op']}"
        facts = answer["facts"]
        if facts is not None:
            self._before(op, facts, result)
        in_reset = op["op"] == "reset"
        self.vllm.apply(answer["events"], in_reset=in_reset)
        self.ours.apply(result["events"], in_reset=in_reset)
        self.pending = result["pending"]
        self._judge_streams()
        self._judge_room(result)
        self._judge_blocks()
        self._judge_hits(facts, result)
        self._judge_load(op, result)
        self._judge_residents()

    # what is known of both sides

    def _before(self, op: Op, facts: Answer, result: Answer) -> None:
        self.requests.see(op, facts)
        note = getattr(self, f"_note_{op['op']}", None)
        if note is not None:
            note(op, facts, result)

    def _note_step(self, op: Op, facts: Answer, result: Answer) -> None:
        self.copying[self.steps] = facts["stored"]
        self.steps += 1
        for item in facts["scheduled"]:
            self.no_room.update(map(key_of, item["no_room"]))
            if not item["tracked"]:
                self.untracked.update(map(key_of, result["offered"].get(item["request"], [])))
        self.declined.update({key_of(name): set(why) for name, why in result["declined"].items()})
        self.ever_lost.update(self.declined)

    def _note_finish(self, op: Op, facts: Answer, result: Answer) -> None:
        self.no_room.update(map(key_of, facts["no_room"]))
        if not facts["tracked"]:
            self.untracked.update(map(key_of, facts["hashes"]))
            self.mislabelled.update(map(key_of, facts["flushed"]))

    _note_abort = _note_finish

    def _note_stored(self, op: Op, facts: Answer, result: Answer) -> None:
        self.copying.pop(op["step"], None)

    def _note_admit(self, op: Op, facts: Answer, result: Answer) -> None:
        self._load_resets[op["request"]] = self.resets

    def _note_reset(self, op: Op, facts: Answer, result: Answer) -> None:
        """vLLM forgets nothing while a transfer is pending, though it drops the transfer's result."""
        self.resets += 1
        if not facts["cleared"]:
            self.kept_by_reset = set(self.vllm.resident)
        self.copying.clear()
        self.no_room.clear()
        self.declined.clear()
        self.ever_lost.clear()
        self.untracked.clear()

    # the streams by themselves

    def _judge_streams(self) -> None:
        for side, fold, rules in (("vLLM", self.vllm, ARGUED_OF_VLLM), ("ours", self.ours, ARGUED_OF_OURS)):
            for fault, key in fold.faults:
                if fault in rules:
                    self.argue(rules[fault], key)
                else:
                    self.fail(f"{side}: {fault} {key.block_hash}")
        self.ever_lost.update(self.ours.evicted)
        for key in self.vllm.orphans():
            self._explain_orphan(key)
        for key in self.ours.orphans():
            self.fail(f"ours: {key.block_hash} is resident without its parent")

    def _explain_orphan(self, key: Key) -> None:
        """vLLM has a block whose parent it has evicted, or has not got yet."""
        parent = key_of(self.vllm.resident[key].parent or "")
        gone = self.vllm.last.get(parent) == "removed"
        self.argue("root_evicted_first" if gone else "child_before_parent", key)

    def _judge_room(self, result: Answer) -> None:
        """We evict and decline only where the tier is full: no other removal is an eviction."""
        short = any("declined_no_room" in reasons for reasons in result.get("declined", {}).values())
        if (self.ours.evicted or short) and result["free"]:
            self.fail(f"ours: evicted or declined with {result['free']} blocks free")

    # the blocks that were announced

    def _judge_blocks(self) -> None:
        for fold, other in ((self.ours, self.vllm), (self.vllm, self.ours)):
            for block in fold.fresh:
                if block.key in other.announced and (fold is self.ours or block not in self.ours.fresh):
                    self.compared += 1
                    self._compare(block, other.announced[block.key])
        for block in self.ours.fresh:
            self.kept_by_reset.discard(block.key)
            self.declined.pop(block.key, None)
            self._against_request("ours", block)
        for block in self.vllm.fresh:
            self._against_request("vLLM", block)

    def _compare(self, block: Block, other: Block) -> None:
        if block == other or block.key in self.mislabelled:
            return
        if self.requests.renumbered(block, other):
            self.argue("renumbered_adapter", block.key)
            return
        names = [name for name in Block._fields if getattr(block, name) != getattr(other, name)]
        self.fail(f"{block.key.block_hash}: {', '.join(names)} differ: {block} and {other}")

    def _against_request(self, side: str, block: Block) -> None:
        """What is said must be true even where the other side says nothing."""
        truth = self.requests.truth.get(block.key)
        if truth is None:
            self.fail(f"{side}: {block.key.block_hash} is of no request")
        elif side == "vLLM" and block.key in self.mislabelled:
            self.argue("reused_id_mislabels", block.key)
        elif block != truth and not self.requests.renumbered(block, truth):
            self.fail(f"{side}: {block} is not as in the request: {truth}")

    # hits

    def _judge_hits(self, facts: Answer | None, result: Answer) -> None:
        """Each side must hit exactly what it holds: a difference then is one of the resident sets."""
        if facts is None or "looked_up" not in result:
            return
        keys = [key_of(name) for name in result["looked_up"]]
        size = self.requests.block_size
        ours, vllm = depth(keys, self.ours.resident.__contains__), depth(keys, self.vllm.resident.__contains__)
        if result["hit"] != ours:
            self.fail(f"ours: a hit of {result['hit']} blocks where the stream says {ours}")
        if facts["hit"] == vllm * size:
            return
        if facts["hit"] == size * depth(keys, lambda key: self.vllm.copies[key] > 0):
            self.argue("stored_twice", keys[vllm])
        else:
            self.fail(f"vLLM: a hit of {facts['hit']} tokens where its stream says {vllm * size}")

    def _judge_load(self, op: Op, result: Answer) -> None:
        if not result.get("loaded"):
            return
        loaded, wanted = result["loaded"][0], result["wanted"]
        if self._load_resets[op["request"]] != self.resets:
            self.argue("load_after_reset", key_of(op["request"]))
            wanted = 0
        if loaded != wanted:
            self.fail(f"ours: {loaded} of {wanted} blocks loaded")

    # what is resident

    def _judge_residents(self) -> None:
        self.untracked -= self.vllm.resident.keys() & self.ours.resident.keys()
        for key in self.vllm.resident.keys() - self.ours.resident.keys():
            self._settle(key, "vLLM", self._missing_in_ours(key))
        for key in self.ours.resident.keys() - self.vllm.resident.keys():
            self._settle(key, "ours", self._missing_in_vllm(key))

    def _settle(self, key: Key, side: str, kind: str | None) -> None:
        if kind is None:
            self.fail(f"only {side} has {key.block_hash}")
        else:
            self.argue(kind, key)

    def _missing_in_ours(self, key: Key) -> str | None:
        """Why vLLM has a block and we have not."""
        if key in self.kept_by_reset:
            return "reset_while_pending"
        if self.ours.last.get(key) == "removed":
            return "eviction_order"
        if self.pending.get(key.block_hash) == "held":
            return "held_for_parent"
        if self._was_full(key) or (key in self.no_room and key.block_hash in self.pending):
            return "room_for_a_chain"
        if key in self.mislabelled or (key in self.untracked and key.block_hash in self.pending):
            return "reused_id"
        return "first_copy_counts" if self._is_second_copy(key) else None

    def _is_second_copy(self, key: Key) -> bool:
        """vLLM has stored the block twice, and the copy that is ours too is still under way."""
        return key.block_hash in self.pending and self._is_copying(key)

    def _is_copying(self, key: Key) -> bool:
        """A store of vLLM with this block is under way."""
        return any(key.block_hash in names for names in self.copying.values())

    def _was_full(self, key: Key) -> bool:
        """We declined the block, and have not announced it since, because it or its parent found no room."""
        reasons = self.declined.get(key, set())
        if not reasons or not reasons <= TIER_FULL:
            return False
        return "declined_no_room" in reasons or self._is_lost(key._replace(block_hash=self._parent(key)))

    def _parent(self, key: Key) -> str:
        truth = self.requests.truth.get(key)
        return (truth and truth.parent) or ""

    def _is_lost(self, key: Key) -> bool:
        """We declined this block, or evicted it, at any time since the last reset."""
        return key in self.ever_lost

    def _missing_in_vllm(self, key: Key) -> str | None:
        """Why we have a block and vLLM has not."""
        if self.vllm.last.get(key) == "removed":
            return "stored_twice" if self.vllm.copies[key] > 0 else "eviction_order"
        if key in self.no_room or (key in self.ever_lost and self._is_copying(key)):
            return "room_for_a_chain"
        return "reused_id" if key in self.untracked else None


def depth(keys: list[Key], has: Callable[[Key], bool]) -> int:
    """How many leading keys are there."""
    return next((place for place, key in enumerate(keys) if not has(key)), len(keys))


def pairs(script: Script, answers: list[Answer], results: list[Answer]) -> Iterator[tuple[Op, Answer, Answer]]:
    yield from zip(script["ops"], answers, results, strict=False)


def compare(script: Script, answers: list[Answer], results: list[Answer]) -> Verdict:
    """Judge one script. `answers` are vLLM's and may end early, where it raised."""
    comparison = Comparison(script)
    for number, (op, answer, result) in enumerate(pairs(script, answers, results)):
        comparison.play(number, op, answer, result)
    if "raised" in answers[-1]:
        comparison.fail(f"vLLM raised {answers[-1]['raised']}")
    return comparison.verdict()
