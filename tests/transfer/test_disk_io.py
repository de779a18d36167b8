"""Whole reads and writes, and faults counted by kind."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvevents_service.transfer.disk_io import DiskFaults, ShortFile, read_all, write_all


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield opened
    os.close(opened)


def test_a_call_that_is_cut_goes_on_there(fd: int, monkeypatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, some, offset: min(4, pwrite(fd, some, offset)))
    monkeypatch.setattr(os, "preadv", lambda fd, some, offset: min(4, preadv(fd, some, offset)))
    write_all(fd, memoryview(b"abcdefghi"), 7)
    assert os.pread(fd, 20, 7) == b"abcdefghi"
    back = bytearray(9)
    read_all(fd, memoryview(back), 7)
    assert back == b"abcdefghi"


def test_a_file_that_ends_too_soon(fd: int) -> None:
    os.pwrite(fd, b"12345", 0)
    with pytest.raises(ShortFile):
        read_all(fd, memoryview(bytearray(8)), 0)


def test_a_disk_that_takes_nothing_is_an_error_and_no_endless_loop(fd: int, monkeypatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *call: 100)
    with pytest.raises(OSError, match="no more bytes"):
        write_all(fd, memoryview(bytes(8192)), 0, 4096)


def test_faults_are_counted_by_kind() -> None:
    faults = DiskFaults()
    assert set(faults.stats().values()) == {0}
    for number in (errno.ENOSPC, errno.ENOSPC, errno.EDQUOT):
        faults.count_error(OSError(number, "x"))
    faults.count_error(OSError("x"))
    faults.count_error(ShortFile())
    faults.count("checksum")
    assert {kind: count for kind, count in faults.stats().items() if count} == {
        "disk_errors_checksum": 1,
        "disk_errors_edquot": 1,
        "disk_errors_enospc": 2,
        "disk_errors_other": 1,
        "disk_errors_short": 1,
    }
