"""Faults that the disk tier counts are said now and then, each kind by itself."""

import pytest

from kvevents_service.service.disk_watch import DiskWatch


def test_what_has_grown_is_said_the_first_time_and_at_powers_of_ten(caplog: pytest.LogCaptureFixture) -> None:
    stats = {"disk_errors_checksum": 0, "disk_errors_short": 0, "disk_layouts_void": 0, "disk_blocks_recovered": 9}
    watch = DiskWatch(lambda: stats)
    for checksum, void in ((0, 0), (3, 0), (4, 1), (12, 1), (12, 1)):
        stats |= {"disk_errors_checksum": checksum, "disk_layouts_void": void}
        watch.look()
    assert [record.getMessage() for record in caplog.records] == [
        "disk_path: an error (checksum) (3 so far)",
        "disk_path: what was kept is of another layout and is void (1 so far)",
        "disk_path: an error (checksum) (12 so far)",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
