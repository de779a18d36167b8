"""Scripts that hypothesis makes: the same lives as lives.py without its habits, the same ones in every run."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from oracle.cases import FRENCH, LEGAL, P, Q
from oracle.hybrid import MODELS
from oracle.lives import NAMES
from oracle.script import Op, Script, add, admit, forget, make_script, of, reported, reset, step, stored

PROMPTS = (P[:9], [*P, 1], [*Q, 2, 2], [*P, *Q], list(range(50, 90)))
IMAGES = st.sampled_from(([], [["cat", 2, 5]], [["cat", 0, 3], ["dog", 7, 20]]))


def names() -> st.SearchStrategy[str]:
    return st.sampled_from(NAMES[:3])


def adds() -> st.SearchStrategy[Op]:
    about: dict[str, Any] = {
        "lora": st.sampled_from((None, None, FRENCH, LEGAL)),
        "salt": st.sampled_from((None, None, "tenant-1")),
        "images": IMAGES,
    }
    return st.builds(add, names(), st.sampled_from(PROMPTS), **about)


def steps() -> st.SearchStrategy[Op]:
    schedule = st.dictionaries(names(), st.sampled_from((1, 4, 9, 30)), max_size=3)
    return schedule.map(lambda counts: step(**counts))


def operations() -> st.SearchStrategy[Op]:
    numbers = st.integers(0, 12)
    return st.one_of(
        adds(),
        st.builds(admit, names(), st.sampled_from((None, None, 0, 8))),
        steps(),
        steps(),
        st.builds(stored, numbers),
        st.builds(reported, numbers),
        st.builds(of, st.sampled_from(("loaded", "finish", "finish", "preempt", "lookup", "abort")), names()),
        st.builds(forget),
        st.builds(reset, running=st.booleans()),
    )


def scripts() -> st.SearchStrategy[Script]:
    return st.builds(
        lambda ops, model, sizes, ranks, lazy: make_script(
            "generated", *begin(), *ops, *map(stored, range(30)), model=MODELS[model], cpu_blocks=sizes[0],
            gpu_blocks=sizes[1], ranks=ranks, lazy=lazy,
        ),
        st.lists(operations(), min_size=5, max_size=40),
        st.sampled_from(sorted(MODELS)),
        st.tuples(st.sampled_from((6, 20, 100)), st.sampled_from((24, 60))),
        st.sampled_from((1, 1, 2, 3)),
        st.booleans(),
    )  # fmt: skip


def begin() -> list[Op]:
    """One request is running: most lives do something then."""
    return [add("a", PROMPTS[3]), admit("a"), step(a=13), step(a=4)]


def generate(count: int, number: int) -> list[Script]:
    """The first `count` scripts of a seed; distinct."""
    made: list[Script] = []

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(scripts())
    def collect(script: Script) -> None:
        made.append({**script, "name": f"generated {len(made)}"})

    collect()
    return made
