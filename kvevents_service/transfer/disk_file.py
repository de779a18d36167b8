"""Files of the disk tier: private, without a name or kept under one, their space taken at start."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import uuid

from kvevents_service.errors import ConfigError
from kvevents_service.transfer.disk_io import SECTOR_BYTES

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MODE = 0o600


class DiskFile:
    """An open file. `fd` goes through the page cache, `direct_fd` around it: None where the file system refuses."""

    def __init__(self, fd: int, direct_fd: int | None) -> None:
        self.fd = fd
        self.direct_fd = direct_fd

    def __repr__(self) -> str:
        return f"<DiskFile fd={self.fd} direct={self.direct_fd is not None}>"

    def close(self) -> None:
        """Once. What has no name is gone then."""
        os.close(self.fd)
        if self.direct_fd is not None:
            os.close(self.direct_fd)

    def take(self, size_bytes: int) -> None:
        """Make the file exactly this large, with all its space taken. ConfigError if that cannot be had."""
        _check_space(self.fd, size_bytes)
        try:
            os.ftruncate(self.fd, size_bytes)
            os.posix_fallocate(self.fd, 0, size_bytes)
        except OSError as error:
            raise ConfigError("disk_bytes", f"space that can be taken ({error.strerror})") from error
        if self.direct_fd is not None and not _takes_sectors(self.direct_fd):
            os.close(self.direct_fd)
            self.direct_fd = None


def nameless_file(directory: str, *, direct: bool) -> DiskFile:
    """A new file that is unlinked before anything is in it: it leaves with the process."""
    path = os.path.join(directory, f".kvevents-{uuid.uuid4().hex}")
    try:
        fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, _MODE)
        try:
            return DiskFile(fd, _open_direct(path, fd) if direct else None)
        finally:
            os.unlink(path)
    except OSError as error:
        raise _no_directory(error) from error


def kept_file(path: str, *, direct: bool = False) -> DiskFile:
    """A file that stays, made if it is not there. ConfigError unless it is ours alone: nobody else may have written
    what an engine will load. It is locked: two sidecars never have the same one."""
    try:
        fd = os.open(path, _FLAGS | os.O_CREAT, _MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError("disk_path", f"no symbolic link at {path}") from error
        raise _no_directory(error) from error
    try:
        _check_owner(fd, path)
        _lock(fd, path)
        return DiskFile(fd, _open_direct(path, fd) if direct else None)
    except BaseException:
        os.close(fd)
        raise


def _no_directory(error: OSError) -> ConfigError:
    return ConfigError("disk_path", f"a directory that files can be made in ({error.strerror})")


def _check_owner(fd: int, path: str) -> None:
    status = os.fstat(fd)
    private = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == _MODE and status.st_nlink == 1
    if not private or status.st_uid != os.geteuid():
        raise ConfigError("disk_path", f"{path} to be a file of this user alone, mode 0600, with one name")


def _lock(fd: int, path: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError("disk_path", f"{path} not to be in use by another sidecar") from error


def _open_direct(path: str, fd: int) -> int | None:
    """The same file around the page cache, or None."""
    try:
        direct = os.open(path, _FLAGS | os.O_DIRECT)
    except OSError:  # this file system has no direct I/O
        return None
    if os.path.sameopenfile(fd, direct):
        return direct
    os.close(direct)
    return None


def _takes_sectors(fd: int) -> bool:
    """Whether direct reads of single sectors go well: a disk of larger blocks would refuse them."""
    if os.fstat(fd).st_size < 2 * SECTOR_BYTES:
        return False
    with mmap.mmap(-1, 2 * SECTOR_BYTES) as pages, memoryview(pages)[SECTOR_BYTES:] as sector:
        try:
            return os.preadv(fd, [sector], SECTOR_BYTES) == SECTOR_BYTES
        except OSError:
            return False


def _check_space(fd: int, size_bytes: int) -> None:
    """What the file has already need not be free."""
    status = os.fstatvfs(fd)
    free = status.f_bavail * status.f_frsize + os.fstat(fd).st_blocks * 512
    if size_bytes > free:
        raise ConfigError("disk_bytes", f"at most {free}, what is free on the file system of disk_path")
