"""Sizes with units: exact, or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.sizes import parse_size, size_text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8 GiB", 8 << 30),
        ("8Gi", 8 << 30),
        ("1.5KiB", 1536),
        ("512MB", 512_000_000),
        ("1kB", 1000),
        ("1KB", 1000),
        ("2TiB", 2 << 40),
        ("17B", 17),
        ("0GiB", 0),
    ],
)
def test_a_unit_says_how_many_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "8", "G", "8G", "8gib", "8 GiBs", "-1GiB", "1e3KiB", "0.0001KiB", "1.KiB", "\u0663GiB", "9" * 99],
)
def test_what_is_not_exact_is_refused(text: str) -> None:
    assert parse_size(text) is None


@given(st.integers(0, 1 << 50), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_units_are_powers_of_1024(count: int, unit: str) -> None:
    number = count % 1000
    assert parse_size(f"{number}{unit}") == number * 1024 ** (["KiB", "MiB", "GiB", "TiB"].index(unit) + 1)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (8 << 30, "8 GiB"),
        (3 << 50, "3072 TiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert size_text(size) == text
