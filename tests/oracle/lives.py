"""Random scripts of a seed: lives that mostly make sense, on a model drawn from a list."""

from __future__ import annotations

from random import Random
from typing import Any

from oracle.cases import FRENCH, LEGAL, P, Q
from oracle.hybrid import MODELS
from oracle.script import (
    Op,
    Plain,
    Script,
    add,
    admit,
    forget,
    make_model,
    make_script,
    of,
    reported,
    reset,
    step,
    stored,
)

ADAPTERS = (None, None, None, None, FRENCH, LEGAL)
NAMES = "abcde"
FULL_MODELS = [make_model(("full_attention", size)) for size in (2, 4, 4, 4, 8)]


def random_tokens(random: Random) -> list[int]:
    """One of a few beginnings and an end of its own: prompts share prefixes."""
    beginnings = (P[:8], P, Q, list(range(50, 70)), [9] * 12)
    tail = [random.randrange(3) for _ in range(random.randrange(1, 12))]
    return [*random.choice(beginnings), *tail]


def random_images(random: Random, length: int) -> list[list[Any]]:
    images, offset = [], random.randrange(12)
    while random.random() < 0.6 and offset < length:
        size = random.randrange(1, 11)
        images.append([random.choice(("cat", "dog")), offset, min(size, length - offset)])
        offset += size + random.randrange(5)
    return images


def random_add(random: Random, name: str) -> Op:
    tokens = random_tokens(random)
    return add(
        name,
        tokens,
        lora=random.choice(ADAPTERS),
        salt=random.choice((None, None, None, None, None, "tenant-1", "tenant-2")),
        images=random_images(random, len(tokens)) if random.random() < 0.4 else [],
    )


class Lives:
    """Makes operations that mostly make sense: it remembers roughly what every request is doing."""

    def __init__(self, random: Random, ranks: int) -> None:
        self.random = random
        self.ranks = ranks
        self.doing: dict[str, str] = dict.fromkeys(NAMES, "ended")
        self.prompts: list[Op] = []
        self.unstored: list[int] = []
        self.steps = 0

    def next(self) -> list[Op]:
        verbs = {
            "begin": 4.0, "admit": 4.0, "lookup": 0.4, "step": 8.0, "stored": 7.0, "loaded": 2.5,
            "reported": 6.0 * (self.ranks > 1),
            "forget": 1.0, "preempt": 0.6, "finish": 3.0, "abort": 0.3, "reset": 0.15,
        }  # fmt: skip
        verb = self.random.choices(list(verbs), list(verbs.values()))[0]
        op: Op = getattr(self, verb)()
        load = verb == "admit" and self.random.random() < 0.5
        return [op, self.step(), of("loaded", op["request"])] if load else [op]

    def _name(self, *doing: str) -> str:
        """A request that is doing one of these, as a rule."""
        names = [name for name in NAMES if self.doing[name] in doing and self.random.random() < 0.95]
        return self.random.choice(names or list(NAMES))

    def begin(self) -> Op:
        """A new prompt, or one that was there before: its blocks may have left the engine by now."""
        name = self._name("ended")
        self.doing[name] = "waiting"
        if self.prompts and self.random.random() < 0.6:
            return {**self.random.choice(self.prompts), "request": name}
        self.prompts.append(random_add(self.random, name))
        return self.prompts[-1]

    def lookup(self) -> Op:
        return of("lookup", self._name("waiting"))

    def admit(self) -> Op:
        name = self._name("waiting")
        self.doing[name] = "running"
        return admit(name, self.random.choice((None, None, None, 0, 4, 8)))

    def step(self) -> Op:
        self.unstored.append(self.steps)
        self.steps += 1
        running = [name for name in NAMES if self.doing[name] == "running"]
        chosen = [name for name in running if self.random.random() < 0.8]
        return step(**{name: self.random.choice((1, 4, 13, 30, 30)) for name in chosen})

    def stored(self) -> Op:
        """Mostly the oldest, sometimes any."""
        if not self.unstored:
            return stored(self.steps)
        first = self.random.random() < 0.6
        return stored(self.unstored.pop(0 if first else self.random.randrange(len(self.unstored))))

    def reported(self) -> Op:
        return reported(self.random.choice(self.unstored or [self.steps]))

    def loaded(self) -> Op:
        return of("loaded", self._name("running"))

    def forget(self) -> Op:
        return forget()

    def preempt(self) -> Op:
        name = self._name("running")
        self.doing[name] = "waiting"
        return of("preempt", name)

    def finish(self) -> Op:
        name = self._name("running")
        self.doing[name] = "ended"
        return of("finish", name)

    def abort(self) -> Op:
        name = self._name("running", "waiting")
        self.doing[name] = "ended"
        return of("abort", name)

    def reset(self) -> Op:
        running = self.random.random() < 0.5
        if running:
            self.doing = {name: "waiting" if doing == "running" else doing for name, doing in self.doing.items()}
        return reset(running=running)


def random_script(
    seed: int, model: Plain | None = None, *, ranks: int = 1, lazy: bool = False, length: int = 120
) -> Script:
    """The script of a seed. Few blocks on purpose: it evicts, and preempted requests lose their blocks for good."""
    random = Random(seed)
    lives = Lives(random, ranks)
    ops = [op for _ in range(length) for op in lives.next()]
    model = model or random.choice(FULL_MODELS)
    wide = len(model["groups"])
    return make_script(
        f"random {seed}",
        *ops,
        *map(stored, lives.unstored),
        cpu_blocks=random.choice((6, 10, 20, 40, 200)) * wide,
        gpu_blocks=random.choice((12, 16, 24, 60)) * wide,
        model=model,
        ranks=ranks,
        lazy=lazy,
    )


def mixed_script(seed: int) -> Script:
    """Any model; some lazy, some of several ranks."""
    random = Random(f"mixed {seed}")
    name = random.choice(list(MODELS))
    ranks, lazy = random.choice((1, 1, 1, 2, 3, 4)), random.random() < 0.25
    script = random_script(seed, MODELS[name], ranks=ranks, lazy=lazy)
    return {**script, "name": f"{name} {seed}{' lazy' * lazy} of {ranks}"}
