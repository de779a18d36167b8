"""Files that stay are ours alone: what an engine loads nobody else has written, and no two sidecars share one."""

import os
from pathlib import Path

import pytest

from kvevents_service.errors import ConfigError
from kvevents_service.transfer.disk_file import kept_file, nameless_file


def test_a_kept_file_is_made_private_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    before = os.umask(0)
    file = kept_file(str(path), direct=True)
    os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not os.get_inheritable(file.fd)
    os.pwrite(file.fd, b"here", 0)
    file.close()
    again = kept_file(str(path))
    assert os.pread(again.fd, 4, 0) == b"here"
    again.close()


def test_one_sidecar_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "kept")
    file = kept_file(path)
    with pytest.raises(ConfigError, match="in use by another sidecar"):
        kept_file(path)
    file.close()
    kept_file(path).close()


def make_link(path: Path) -> None:
    (path.parent / "elsewhere").touch(0o600)
    path.symlink_to(path.parent / "elsewhere")


def make_second_name(path: Path) -> None:
    path.touch(0o600)
    os.link(path, path.parent / "second")


def make_readable(path: Path) -> None:
    path.touch()
    path.chmod(0o644)


def make_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def make_foreign(path: Path) -> None:
    path.touch(0o600)
    try:
        os.chown(path, 12345, -1)
    except PermissionError:
        pytest.skip("only root can give a file away")


@pytest.mark.parametrize("make", [make_link, make_second_name, make_readable, make_pipe, make_foreign, Path.mkdir])
def test_what_is_not_ours_alone_is_refused(tmp_path: Path, make) -> None:
    path = tmp_path / "kept"
    make(path)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as error:
        kept_file(str(path), direct=True)
    assert error.value.setting == "disk_path"
    del error
    assert set(os.listdir("/proc/self/fd")) == before


def test_both_ways_lead_to_one_file(tmp_path: Path) -> None:
    file = nameless_file(str(tmp_path), direct=True)
    file.take(1 << 16)
    os.pwrite(file.fd, b"x" * 4096, 4096)
    direct = file.direct_fd
    if direct is None:
        pytest.skip("this file system has no direct I/O")
    assert os.path.sameopenfile(file.fd, direct)
    assert not os.get_inheritable(direct)
    file.close()


def test_a_file_smaller_than_two_sectors_goes_through_the_page_cache(tmp_path: Path) -> None:
    file = nameless_file(str(tmp_path), direct=True)
    file.take(4096)
    assert file.direct_fd is None
    file.close()


def test_space_that_the_file_has_need_not_be_free(tmp_path: Path, monkeypatch) -> None:
    file = nameless_file(str(tmp_path), direct=False)
    file.take(1 << 20)
    status = os.fstatvfs(file.fd)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result((*status[:4], 0, *status[5:])))
    file.take(1 << 20)
    with pytest.raises(ConfigError, match="at most"):
        file.take(1 << 22)
    file.close()
