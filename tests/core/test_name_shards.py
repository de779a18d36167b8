"""Names in many small tables are found, added and removed as in one dict."""

from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.core.name_shards import SHARDS, NameShards

NAMES = st.lists(st.binary(min_size=1, max_size=2), unique=True, max_size=20)


def held(*names: bytes) -> NameShards:
    shards = NameShards()
    shards.add(list(names), range(len(names)))
    return shards


@given(st.lists(st.tuples(st.booleans(), NAMES), max_size=8), NAMES)
def test_it_is_a_dict_of_many(history: list[tuple[bool, list[bytes]]], asked: list[bytes]) -> None:
    """Names of one length and of several."""
    shards, truth = NameShards(), dict[bytes, int]()
    for number, (adds, names) in enumerate(history):
        if adds:
            fresh = [name for name in names if name not in truth]
            assert shards.is_disjoint(fresh)
            shards.add(fresh, range(number, number + len(fresh)))
            truth |= zip(fresh, range(number, number + len(fresh)), strict=True)
        else:
            assert shards.pop_all(names) == [truth.pop(name, None) for name in names]
        assert dict(shards.items()) == truth
    assert (len(shards), bool(shards), set(shards)) == (len(truth), bool(truth), set(truth))
    assert sorted(shards.slots()) == sorted(truth.values())
    assert (
        list(shards.get_all(asked)) == [truth.get(name) for name in asked] == [shards.get(name) for name in asked]
    )
    assert [name in shards for name in asked] == [name in truth for name in asked]
    assert shards.is_disjoint(asked) == truth.keys().isdisjoint(asked)


def test_names_are_spread_over_the_tables() -> None:
    shards = held(*(bytes((number % 7, number)) for number in range(SHARDS)))
    assert [len(table) for table in shards._tables] == [1] * SHARDS
    assert {id(shard) for shard in shards.shards} == {id(table) for table in shards._tables}


def test_one_name_leaves_alone() -> None:
    shards = held(b"ab", b"cb")
    assert (shards.pop_all([b"ab"]), shards.pop_all([b"ab"]), shards.get(b"cb")) == ([0], [None], 1)
    assert repr(shards) == "<NameShards 1 names>"
