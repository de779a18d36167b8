"""With numpy and without it the bytes are the same."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.wire import columns

FORMS = [(4, 0, 4, True), (4, 0, 2, True), (32, 24, 8, False), (12, 4, 8, False)]


@given(
    st.binary(max_size=200),
    st.sampled_from(FORMS),
)
def test_both_ways_write_the_same(data: bytes, form: tuple[int, int, int, bool]) -> None:
    stride, start, width, little = form
    packed = data[: len(data) // stride * stride]
    used = columns.Columns()
    used.prefixed(0xCE, width, bytes(3 * stride), stride, start, little=little)
    quick = used.prefixed(0xCE, width, packed, stride, start, little=little)
    plain = columns._by_slices(0xCE, width, packed, stride, start, little=little)
    order = "little" if little else "big"
    values = [
        int.from_bytes(packed[at + start : at + start + width], order) for at in range(0, len(packed), stride)
    ]
    assert bytes(quick) == bytes(plain) == b"".join(b"\xce" + value.to_bytes(width, "big") for value in values)


@pytest.mark.parametrize("without", [False, True])
@given(st.lists(st.sampled_from([0, 255, 256, 65_535, 65_536, 2**24, 2**31 - 1])))
def test_whether_all_fit_16_bits(without: bool, values: list[int]) -> None:
    packed = b"".join(value.to_bytes(4, "little") for value in values)
    with pytest.MonkeyPatch.context() as patch:
        if without:
            patch.setattr(columns, "numpy", None)
        assert columns.fits_16_bits(packed) == all(value < 65_536 for value in values)


CODE = """
import sys
sys.modules["numpy"] = None
from kvevents_service.wire import columns
assert columns.numpy is None
made = columns.Columns().prefixed(0xCE, 4, bytes([1, 0, 0, 0]), 4, 0, little=True)
assert bytes(made) == bytes([0xCE, 0, 0, 0, 1])
"""


def test_it_works_where_numpy_is_not_installed() -> None:
    assert subprocess.run([sys.executable, "-c", CODE], timeout=60, check=False).returncode == 0
