"""A fault that repeats is logged less and less."""

from kvevents_service.service.rarely import is_told


def test_each_power_of_ten_is_told() -> None:
    assert [count for count in range(1, 2001) if is_told(count)] == [1, 10, 100, 1000]
