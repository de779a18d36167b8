"""Both sides of a script, block by block after every operation. docs/differences.md argues each kind of difference.

A difference is looked at where it shows, with what both sides are known to hold at that moment, and goes under the
one rule that fits exactly. What no rule fits is unexplained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from oracle.fold import Block, Fold, Key
from oracle.models import CHUNK, PREFIX, STATE, model_of
from oracle.script import Answer, Op, Script
from oracle.truth import Requests, empty, key_of

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
    "state_metadata",
    "lazy_metadata",
    "tail_metadata",
    "inner_later",
    "stored_twice",
    "child_before_parent",
    "root_evicted_first",
    "held_for_parent",
    "first_copy_counts",
    "eviction_order",
    "room_for_a_chain",
    "lazy_chain",
    "lazy_orphan",
    "reset_while_pending",
    "reused_id",
    "reused_id_mislabels",
    "found_by_hash",
    "freed_block_mislabels",
    "unready_block",
    "renumbered_adapter",
    "load_after_reset",
    "hit_cut_short",
    "chunk_boundary",
)


class Verdict(NamedTuple):
    """What came of one script: how many announcements were compared, and every difference by its kind."""

    compared: int
    argued: Counter[str]
    unexplained: list[str]


def keys_of(places: list[tuple[int, str]]) -> list[Key]:
    return [key_of(group, name) for group, name in places]


class Comparison:
    """Plays both answers of one script side by side."""

    def __init__(self, script: Script) -> None:
        self.model = model_of(script["model"])
        self.lazy = script["lazy"]
        prefix = {group.index: group.block_size for group in self.model.groups if group.kind in PREFIX}
        self.vllm, self.ours = Fold(prefix), Fold(prefix)
        self.requests = Requests(self.model, fine=self.model.fine_grained and not self.lazy)
        self.compared = 0
        self.argued: dict[tuple[str, Key], None] = {}
        self.unexplained: list[str] = []
        self.place = ""
        self.pending: dict[Key, str] = {}
        self.declined: dict[Key, set[str]] = {}
        self.ever_lost: set[Key] = set()
        self.copying: dict[int, set[Key]] = {}
        self.no_room: set[Key] = set()
        self.kept_by_reset: set[Key] = set()
        self.untracked: set[Key] = set()
        self.mislabelled: set[Key] = set()
        self.stale: set[Key] = set()
        self.unready: set[Key] = set()
        self.found: set[Key] = set()
        self.flushing: set[Key] = set()
        self.named: set[Key] = set()
        self.tails: set[Key] = set()
        self.to_name: set[Key] = set()
        self.ahead: set[Key] = set()
        self.odd: list[Block] = []
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
        self.pending = {key_of(*place): how for place, how in result["pending"]}
        self._judge_streams()
        self._judge_pending()
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
        self.copying[self.steps] = set(keys_of(facts["stored"]))
        self.flushing.clear()
        self.steps += 1
        offered = {name: keys_of(places) for name, places in result["offered"].items()}
        for item in facts["scheduled"]:
            self.no_room.update(keys_of(item["no_room"]))
            self.found.update(self._found_by_hash(item["request"], item))
            if not self.lazy:
                self.to_name.update(self._names_to_come(item["request"], item))
            if not item["tracked"] and not self.lazy:
                self.untracked.update(offered.get(item["request"], []))
        for entry in facts["boundaries"]:
            self._note_boundary(entry)
        self.stale.update(keys_of(facts["stale"]))
        self.unready.update(keys_of(facts["unready"]))
        if self.lazy:
            self.ahead.update({key for keys in offered.values() for key in keys} - self.copying[self.steps - 1])
        self.named.update(keys_of(result["named"]))
        self.declined.update({key_of(*place): set(why) for place, why in result["declined"]})
        self.ever_lost.update(self.declined)

    def _found_by_hash(self, name: str, facts: Answer) -> Iterator[Key]:
        """Blocks that the request's table has no more."""
        for index, blocks in facts["blocks"].items():
            group = self.model.groups[int(index)]
            names = (self.requests.known[name].name(group, number) for number, _, lost, _ in blocks if lost)
            yield from (key_of(group.index, block_hash) for block_hash in names)

    def _names_to_come(self, name: str, facts: Answer) -> Iterator[Key]:
        """Inner names that blocks have when they are first offered: ours must announce them."""
        known, unit = self.requests.known[name], self.model.hash_size
        for index, blocks in facts["blocks"].items():
            group = self.model.groups[int(index)]
            for number, _, _, inner in blocks:
                key = key_of(group.index, known.name(group, number))
                if key not in self.ours.resident and key not in self.pending:
                    ends = (number * group.block_size + units * unit for units in inner)
                    yield from (key_of(group.index, known.hash_at(end) or "") for end in ends)

    def _note_boundary(self, entry: Answer) -> None:
        if entry["hash"] is not None and entry["no_room"]:
            self.no_room.add(key_of(entry["group"], entry["hash"]))
        if entry["hash"] is not None and not entry["tracked"] and not self.lazy:
            self.untracked.add(key_of(entry["group"], entry["hash"]))

    def _note_finish(self, op: Op, facts: Answer, result: Answer) -> None:
        self.no_room.update(keys_of(facts["no_room"]))
        self.stale.update(keys_of(facts["stale"]))
        if facts["tracked"]:
            self.to_name.update(self._names_to_come(op["request"], facts))
        if facts["tail"] is not None:
            self.tails.add(key_of(*facts["tail"]["first"]))
        self.flushing.update(keys_of(facts["flushed"]))
        if not facts["tracked"] and not self.lazy:
            self.untracked.update(self._blocks_at_the_end(op, facts))
            self.mislabelled.update(keys_of(facts["flushed"]))

    def _blocks_at_the_end(self, op: Op, facts: Answer) -> Iterator[Key]:
        known = self.requests.known[op["request"]]
        for index, blocks in facts["blocks"].items():
            group = self.model.groups[int(index)]
            yield from (key_of(group.index, known.name(group, number)) for number, *_ in blocks)
        if facts["tail"] is not None:
            yield key_of(facts["tail"]["group"], facts["tail"]["hash"])

    _note_abort = _note_finish

    def _note_stored(self, op: Op, facts: Answer, result: Answer) -> None:
        if facts["ended"]:
            self.copying.pop(op["step"], None)

    _note_reported = _note_stored

    def _note_admit(self, op: Op, facts: Answer, result: Answer) -> None:
        self._load_resets[op["request"]] = self.resets
        if not facts["accepted"]:
            return
        known, local = self.requests.known[op["request"]], facts["local"]
        for group in self.model.stored:
            for number in group.needed(local + facts["accepted"], local):
                if facts["tables"][group.index][number] not in facts["copied"]:
                    self._judge_gap(key_of(group.index, known.name(group, number)), facts)

    def _judge_gap(self, key: Key, facts: Answer) -> None:
        """vLLM does not load a block that the prefix it computes on needs."""
        group = self.model.groups[key.group]
        if group.kind not in PREFIX and facts["accepted"] < facts["hit"]:
            self.argue("hit_cut_short", key)
        else:
            self.fail(f"vLLM: {key.block_hash} of {facts['accepted']} accepted tokens is not loaded")

    def _note_reset(self, op: Op, facts: Answer, result: Answer) -> None:
        """vLLM forgets nothing while a transfer is pending, though it drops the transfer's result."""
        self.resets += 1
        if not facts["cleared"]:
            self.kept_by_reset = set(self.vllm.resident)
        self.copying.clear()
        self.flushing.clear()
        self.no_room.clear()
        self.declined.clear()
        self.ever_lost.clear()
        self.untracked.clear()
        self.stale.clear()
        self.unready.clear()
        self.found.clear()
        self.ahead.clear()
        self.named.clear()
        self.to_name.clear()

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
        parent = key_of(key.group, self.vllm.resident[key].parent or "")
        gone = self.vllm.last.get(parent) == "removed"
        self.argue("root_evicted_first" if gone else "child_before_parent", key)

    def _judge_pending(self) -> None:
        """A copy that has ended waits only for a parent's that has not."""
        if "held" in self.pending.values() and "copying" not in self.pending.values():
            self.fail(f"ours: {len(self.pending)} blocks wait for no copy")

    def _judge_room(self, result: Answer) -> None:
        """We evict and decline only where the tier is full: no other removal is an eviction."""
        short = any("declined_no_room" in reasons for _, reasons in result.get("declined", []))
        if (self.ours.evicted or short) and result["free"]:
            self.fail(f"ours: evicted or declined with {result['free']} blocks free")

    # the blocks that were announced

    def _judge_blocks(self) -> None:
        for side, fold in (("ours", self.ours), ("vLLM", self.vllm)):
            for block in fold.fresh:
                self._against_request(side, block)
        for fold, other in ((self.ours, self.vllm), (self.vllm, self.ours)):
            for block in fold.fresh:
                if block.key in other.announced and (fold is self.ours or block not in self.ours.fresh):
                    self.compared += 1
                    self._compare(block, other.announced[block.key])
        for block in self.ours.fresh:
            self.kept_by_reset.discard(block.key)
            self.declined.pop(block.key, None)

    def _against_request(self, side: str, block: Block) -> None:
        """What is said must be true even where the other side says nothing."""
        inner = self.requests.inner.get(block.key)
        truth = self.requests.truth.get(block.key, inner)
        if block == truth:
            return
        kind = None
        if truth is not None:
            kind = self._said_by_us(block, truth) if side == "ours" else self._said_by_vllm(block, truth)
        if kind is None:
            self.fail(f"{side}: {block} is not as in the request: {truth}")
        else:
            self.odd.append(block)
            self.argue(kind, block.key)

    def _said_by_us(self, block: Block, truth: Block) -> str | None:
        return "renumbered_adapter" if self.requests.renumbered(block, truth) else None

    def _said_by_vllm(self, block: Block, truth: Block) -> str | None:
        if self.requests.renumbered(block, truth):
            return "renumbered_adapter"
        if self._is_empty(block, truth):
            other = "state_metadata" if truth.kind == STATE else "tail_metadata"
            kind = "lazy_metadata" if self.lazy else other
            if kind != "tail_metadata" or block.key in self.requests.inner or block.key in self.tails:
                return kind
        if block.key in self.mislabelled:
            return "reused_id_mislabels"
        return "freed_block_mislabels" if block.key in self.stale else None

    def _is_empty(self, block: Block, truth: Block) -> bool:
        """vLLM had no snapshot: it says the block's size of a block's first name, and 0 of every other."""
        whole = self.model.groups[block.key.group].block_size
        inner = truth.key in self.requests.inner
        return block in [empty(truth)._replace(block_size=size) for size in ((whole, 0) if inner else (whole,))]

    def _compare(self, block: Block, other: Block) -> None:
        if block == other or block in self.odd or other in self.odd:
            return
        if self.requests.renumbered(block, other):
            self.argue("renumbered_adapter", block.key)
            return
        names = [name for name in Block._fields if getattr(block, name) != getattr(other, name)]
        self.fail(f"{block.key.block_hash}: {', '.join(names)} differ: {block} and {other}")

    # hits

    def _judge_hits(self, facts: Answer | None, result: Answer) -> None:
        """Each side must hit exactly what it holds: a difference then is one of the resident sets."""
        if facts is None or "hit" not in result:
            return
        name, local, tokens = result["request"], facts["local"], facts["tokens"]
        ours = self.requests.servable(name, local, tokens, self.ours.resident.__contains__)
        if result["hit"] != ours:
            self.fail(f"ours: a hit of {result['hit']} tokens where the stream says {ours}")
        vllm = self.requests.servable(name, local, tokens, self.vllm.resident.__contains__)
        if facts["hit"] == vllm:
            return
        copied = self.requests.servable(name, local, tokens, lambda key: self.vllm.copies[key] > 0)
        if not facts["hit"] and self._starts_in_a_chunk(local):
            self.argue("chunk_boundary", key_of(0, name))
        elif facts["hit"] == copied:
            self.argue("stored_twice", key_of(0, name))
        else:
            self.fail(f"vLLM: a hit of {facts['hit']} tokens where its stream says {vllm}")

    def _starts_in_a_chunk(self, local: int) -> bool:
        return any(group.kind == CHUNK and local % (group.window or 1) for group in self.model.groups)

    def _judge_load(self, op: Op, result: Answer) -> None:
        if not result.get("loaded"):
            return
        loaded, wanted = result["loaded"][0], result["wanted"]
        if self._load_resets[op["request"]] != self.resets:
            self.argue("load_after_reset", key_of(0, op["request"]))
            wanted = 0
        if loaded != wanted:
            self.fail(f"ours: {loaded} of {wanted} blocks loaded")

    # what is resident

    def _judge_residents(self) -> None:
        agreed = self.vllm.resident.keys() & self.ours.resident.keys()
        agreed -= self.flushing.union(*self.copying.values())
        for excuse in (
            self.untracked,
            self.found,
            self.stale,
            self.unready,
            self.no_room,
            self.ahead,
            self.mislabelled,
        ):
            excuse -= agreed
        for key in self.vllm.resident.keys() - self.ours.resident.keys():
            self._settle(key, "vLLM", self._missing_in_ours(key))
        for key in self.ours.resident.keys() - self.vllm.resident.keys():
            self._settle(key, "ours", self._missing_in_vllm(key))

    def _excuses(self) -> list[set[Key]]:
        """Blocks that may differ for a reason seen earlier, until both sides agree on them."""
        waiting = [self.untracked, self.no_room, self.found, self.ahead]
        return [*waiting, self.stale, self.unready, self.mislabelled]

    def _settle(self, key: Key, side: str, kind: str | None) -> None:
        if kind is None:
            self.fail(f"only {side} has {key.block_hash}")
        else:
            self.argue(kind, key)

    def _missing_in_ours(self, key: Key) -> str | None:
        """Why vLLM has a block, or the name of a prefix inside one, and we have not."""
        kind = self._ours_lacks(key)
        for owner in self.requests.owners.get(key, set()) - self.ours.resident.keys():
            kind = kind or self._ours_lacks(owner)
        later = key in self.requests.inner and key not in self.named and key not in self.to_name
        return kind or ("inner_later" if later else None)

    def _ours_lacks(self, key: Key) -> str | None:
        pending = key in self.pending
        rules = {
            "reset_while_pending": key in self.kept_by_reset,
            "eviction_order": self.ours.last.get(key) == "removed",
            "held_for_parent": self.pending.get(key) == "held",
            "room_for_a_chain": self._was_full(key) or (key in self.no_room and pending),
            "lazy_chain": key in self.ahead and pending,
            "lazy_orphan": self._is_lazy_orphan(key),
            "reused_id": key in self.mislabelled or (key in self.untracked and pending),
            "freed_block_mislabels": key in self.stale,
            "unready_block": key in self.unready,
            "first_copy_counts": pending and self._is_copying(key),
        }
        return next((kind for kind, fits in rules.items() if fits), None)

    def _is_copying(self, key: Key) -> bool:
        """A store of vLLM with this block is under way."""
        return any(key in keys for keys in self.copying.values())

    def _was_full(self, key: Key) -> bool:
        """We declined the block, and have not announced it since, because it or its parent found no room."""
        reasons = self.declined.get(key, set())
        if not reasons or not reasons <= TIER_FULL:
            return False
        return "declined_no_room" in reasons or self._is_lost(key._replace(block_hash=self._parent(key)))

    def _is_lazy_orphan(self, key: Key) -> bool:
        """Near eviction, and the block before it is in our tier no more and not on its way there."""
        parent = key._replace(block_hash=self._parent(key))
        here = parent in self.ours.resident or parent in self.pending
        return self.lazy and self.declined.get(key, set()) <= TIER_FULL and key in self.declined and not here

    def _parent(self, key: Key) -> str:
        truth = self.requests.truth.get(key)
        return (truth and truth.parent) or ""

    def _is_lost(self, key: Key) -> bool:
        """We declined this block, or evicted it, at any time since the last reset."""
        return key in self.ever_lost

    def _missing_in_vllm(self, key: Key) -> str | None:
        """Why we have a block, or the name of a prefix inside one, and vLLM has not."""
        kind = self._vllm_lacks(key)
        for owner in self.requests.owners.get(key, set()) - self.vllm.resident.keys():
            kind = kind or self._vllm_lacks(owner)
        return kind

    def _vllm_lacks(self, key: Key) -> str | None:
        evicted = self.vllm.last.get(key) == "removed"
        rules = {
            "stored_twice": evicted and self.vllm.copies[key] > 0,
            "eviction_order": evicted,
            "room_for_a_chain": key in self.no_room or (key in self.ever_lost and self._is_copying(key)),
            "reused_id": key in self.untracked,
            "found_by_hash": key in self.found,
            "lazy_chain": key in self.ahead,
            "freed_block_mislabels": key in self.stale and self._is_copying(key),
            "unready_block": key in self.unready and self._is_copying(key),
        }
        return next((kind for kind, fits in rules.items() if fits), None)


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
