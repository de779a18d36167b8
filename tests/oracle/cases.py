"""Scripts: directed ones, each for a thing that went wrong somewhere, and random ones of a seed."""

from __future__ import annotations

from typing import Any

from oracle.script import Op, Script, add, admit, forget, make_model, make_script, of, reset, step, stored

FRENCH = {"id": 1, "name": "french", "path": "/adapters/french"}
LEGAL = {"id": 2, "name": "legal", "path": "/adapters/legal"}
LEGAL_AGAIN = {"id": 3, "name": "legal", "path": "/adapters/legal"}
WIDE = make_model(("full_attention", 16))

P = list(range(1, 14))  # three whole blocks of 4, and one token
Q = [*range(1, 9), *range(40, 49)]  # the first two blocks of P, then two others


def life(name: str, tokens: list[int], first: int, **about: Any) -> list[Op]:
    """Admitted, prefilled and finished; its stores are those of steps `first` + 1 and + 2."""
    ops = [add(name, tokens, **about), admit(name), step(**{name: 8}), step(**{name: 64}), of("finish", name)]
    return [*ops, step(), stored(first + 1), stored(first + 2)]


def metadata() -> list[Script]:
    images = [["cat", 2, 5], ["dog", 9, 2]]
    plain: dict[str, dict[str, Any]] = {
        "plain": {},
        "lora": {"lora": FRENCH},
        "salt": {"salt": "tenant-1"},
        "images": {"images": images},
    }
    everything: dict[str, Any] = {"lora": LEGAL, "salt": "tenant-2", "images": images}
    cases = [make_script(name, *life("a", P, 0, **about)) for name, about in plain.items()]
    long_image = [["film", 3, 30], ["cat", 33, 1], ["cat", 34, 9]]
    return [
        *cases,
        make_script("everything", *life("a", P, 0, **everything), *life("b", Q, 3, **everything)),
        make_script("images across blocks", *life("a", list(range(50)), 0, images=long_image)),
        make_script("same tokens, other adapters", *life("a", P, 0, lora=FRENCH), *life("b", P, 3, lora=LEGAL)),
        make_script("blocks of 16", *life("a", list(range(70)), 0, images=[["cat", 10, 40]]), model=WIDE),
        make_script("adapter with a new number", *renumbered()),
    ]


def renumbered() -> list[Op]:
    """Two requests compute the same blocks at once, with one adapter under two numbers."""
    both = [add("a", P, lora=LEGAL), add("b", P, lora=LEGAL_AGAIN), admit("a"), admit("b")]
    return [*both, step(a=8), step(a=5, b=13), step(a=1, b=1), step(a=1, b=1), stored(1), stored(2), stored(3)]


def sharing() -> list[Script]:
    together = [add("a", P), add("b", P), admit("a"), admit("b"), step(a=13, b=13), step(a=1, b=1)]
    return [
        make_script("a shared prefix", *life("a", P, 0), *life("b", Q, 3)),
        make_script("the same prompt at once", *together, stored(1), of("finish", "a"), of("finish", "b")),
        make_script("the later copy first", *second_copy()),
        make_script("decode goes on", add("a", P), admit("a"), *[step(a=6)] * 9, *map(stored, range(9))),
        make_script("copies end in reverse", add("a", list(range(60))), admit("a"), *reverse()),
        make_script("an id used again", *life("a", P, 0), *life("a", Q, 3)),
        make_script("an id used again too early", *early_reuse()),
        make_script("an id used again and ended too early", *mislabelled()),
    ]


def second_copy() -> list[Op]:
    start = [add("a", P), add("b", P), admit("a"), admit("b"), step(a=8, b=4), step(a=5, b=9)]
    return [*start, step(a=1, b=1), stored(2), stored(1), step(a=1, b=1), stored(3)]


def reverse() -> list[Op]:
    return [*[step(a=8)] * 8, *map(stored, range(7, -1, -1))]


def early_reuse() -> list[Op]:
    """A request ends while its store is pending, and another one takes its id."""
    first = [add("a", P), admit("a"), step(a=13), step(a=1), of("finish", "a")]
    return [*first, add("a", Q[4:]), admit("a"), step(a=13), step(a=4), stored(1), step(a=4), stored(2), stored(3)]


def mislabelled() -> list[Op]:
    """The new request ends as well while the store of the old one is pending."""
    old = [add("a", list(range(24)), lora=FRENCH), admit("a"), step(a=8), step(a=8), of("finish", "a")]
    return [*old, add("a", list(range(60, 84)), salt="tenant-1"), admit("a"), step(a=24), of("finish", "a"), step()]


def loads() -> list[Script]:
    long = [*P, 7, 7, 7, 7]
    gone = [*life("a", P, 0, images=[["cat", 2, 5]]), forget()]
    again = [add("b", long, images=[["cat", 2, 5]]), of("lookup", "b"), admit("b"), step()]
    fewer = [
        add("b", long, images=[["cat", 2, 5]]),
        admit("b", 4),
        step(),
        of("loaded", "b"),
        step(b=20),
        step(b=1),
    ]
    other = [add("b", long, lora=FRENCH), admit("b"), step(b=20), step(b=1)]
    local = [
        *life("c", Q, 3),
        forget(),
        *life("d", P[:9], 6),
        add("b", P, images=[["cat", 2, 5]]),
        admit("b"),
        step(),
    ]
    return [
        make_script("a hit is loaded", *gone, *again, of("loaded", "b"), step(b=20), step(b=1)),
        make_script("fewer tokens are accepted", *gone, *fewer),
        make_script("nothing is accepted", *gone, *again[:2], admit("b", 0), step(b=20), step(b=1)),
        make_script("a hit behind a local one", *life("a", P, 0), forget(), *local, of("loaded", "b"), step(b=9)),
        make_script("no hit for another adapter", *gone, *other),
        make_script("the end comes while it loads", *gone, *again, of("abort", "b"), of("loaded", "b")),
        make_script(
            "reset while it loads", *gone, *again, reset(), of("loaded", "b"), admit("b"), step(b=20), step(b=1)
        ),
        make_script("a hit is not pushed out", *gone, *again[:-1], *life("c", [*Q, *Q], 4), cpu_blocks=4),
    ]


def ends() -> list[Script]:
    begun = [add("a", P), admit("a"), step(a=9), step(a=4)]
    return [
        make_script("abort before the first step", add("a", P), of("abort", "a"), step()),
        make_script("abort after admission", add("a", P), admit("a"), of("abort", "a"), step(), *life("a", P, 2)),
        make_script("finish in the first step", add("a", P), admit("a"), step(a=13), of("finish", "a"), *flush()),
        make_script("preempted and resumed", *begun, of("preempt", "a"), step(), admit("a"), *[step(a=9)] * 3),
        make_script("preempted, then another takes its blocks", *preempted(), gpu_blocks=8),
        make_script("ended while preempted", *begun, of("preempt", "a"), of("finish", "a"), step(), stored(1)),
        make_script("finished twice over", *begun, of("finish", "a"), of("finish", "a"), of("abort", "a"), step()),
    ]


def flush() -> list[Op]:
    return [step(), stored(1)]


def preempted() -> list[Op]:
    first = [add("a", P), admit("a"), step(a=13), of("preempt", "a"), add("b", list(range(60, 80))), admit("b")]
    return [
        *first,
        step(b=20),
        step(b=1),
        admit("a"),
        stored(1),
        step(a=13),
        of("finish", "b"),
        step(a=1),
        stored(3),
    ]


def resets() -> list[Script]:
    full = [*life("a", P, 0), *life("b", Q, 3)]
    flying = [add("c", list(range(70, 90))), admit("c"), step(c=20), step(c=1)]
    return [
        make_script("reset when idle", *full, reset(), *life("c", P, 6)),
        make_script("reset while a store is pending", *full, *flying, reset(), stored(7), step(c=1), stored(8)),
        make_script("reset twice", *full, reset(), reset(), *life("c", P, 6)),
        make_script("reset with running requests", *full, *flying, stored(7), reset(running=True), *resumed()),
        make_script(
            "reset between finish and flush", *flying, of("finish", "c"), reset(), step(), *map(stored, (1, 2))
        ),
    ]


def resumed() -> list[Op]:
    return [step(), admit("c"), step(c=30), step(c=1), stored(10)]


def evictions() -> list[Script]:
    one = [*life("a", P, 0), *life("b", list(range(50, 63)), 3)]
    return [
        make_script("the tier is full", *one, *life("c", list(range(70, 83)), 6), cpu_blocks=6),
        make_script("a chain longer than the tier", *life("a", list(range(60)), 0), cpu_blocks=5),
        make_script("a tier of one block", *one, cpu_blocks=1),
        make_script("used again, then pushed out", *one, *life("d", Q, 6), *life("c", P[5:], 9), cpu_blocks=7),
        make_script("copied twice, evicted once", *twice(), cpu_blocks=7),
    ]


def twice() -> list[Op]:
    ops = [add("a", P), add("b", P), admit("a"), admit("b"), step(a=13, b=13), step(a=1, b=1), stored(1)]
    return [*ops, of("finish", "a"), of("finish", "b"), *life("c", list(range(50, 63)), 2), *life("d", Q, 5)]


def directed() -> list[Script]:
    """Every directed script. At its end all that is still being copied arrives."""
    scripts = [*metadata(), *sharing(), *loads(), *ends(), *resets(), *evictions()]
    return [{**script, "ops": [*script["ops"], *arrivals(script["ops"])]} for script in scripts]


def arrivals(ops: list[Op]) -> list[Op]:
    return [stored(number) for number in range(sum(op["op"] == "step" for op in ops))]
