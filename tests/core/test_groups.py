"""Groups of a hello: what a tier can hold, and which one is named when it cannot."""

import msgspec
import pytest

from kvevents_service.core.groups import KINDS, MAX_GROUPS, PREFIX_KINDS, check_groups
from kvevents_service.errors import ControlError
from kvevents_service.wire.control import GroupSpec

GOOD = GroupSpec(0, "full_attention", 16)
SCRATCH = GroupSpec(1, "mamba", 16, None, False)


@pytest.mark.parametrize("kind", sorted(PREFIX_KINDS))
def test_prefix_kinds_are_served(kind: str) -> None:
    group = msgspec.structs.replace(GOOD, kind=kind)
    assert check_groups([group]) == (group,)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_any_known_kind_may_be_scratch(kind: str) -> None:
    assert check_groups([GOOD, msgspec.structs.replace(SCRATCH, kind=kind)])


@pytest.mark.parametrize("kind", sorted(KINDS - PREFIX_KINDS))
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ControlError) as caught:
        check_groups([msgspec.structs.replace(GOOD, kind=kind)])
    assert (caught.value.code, caught.value.field) == ("unsupported_group", "groups[0].kind")


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ([], "groups"),
        ([msgspec.structs.replace(GOOD, index=i) for i in range(MAX_GROUPS + 1)], "groups"),
        ([msgspec.structs.replace(SCRATCH, index=0)], "groups"),
        ([msgspec.structs.replace(GOOD, index=1)], "groups[0].index"),
        ([GOOD, GOOD], "groups[1].index"),
        ([msgspec.structs.replace(GOOD, block_size=0)], "groups[0].block_size"),
        ([msgspec.structs.replace(GOOD, block_size=-16)], "groups[0].block_size"),
        ([msgspec.structs.replace(GOOD, kind="quantum")], "groups[0].kind"),
        ([GOOD, msgspec.structs.replace(GOOD, index=1, block_size=32)], "groups[1].block_size"),
    ],
)
def test_the_first_bad_group_is_named(groups: list[GroupSpec], field: str) -> None:
    with pytest.raises(ControlError) as caught:
        check_groups(groups)
    assert caught.value.field == field


def test_a_scratch_group_may_have_blocks_of_any_size() -> None:
    assert len(check_groups([GOOD, msgspec.structs.replace(SCRATCH, block_size=1)])) == 2


def test_as_many_groups_as_the_pool_can_name() -> None:
    assert len(check_groups([msgspec.structs.replace(GOOD, index=i) for i in range(MAX_GROUPS)])) == MAX_GROUPS
