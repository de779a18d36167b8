"""send and recv of a socket, and a ring of a bell (an eventfd), that never wait, and keep the GIL.

Python's own give the GIL up for the length of the call. Another thread of the engine then takes it, such as the
one that publishes vLLM's events, and a call of some microseconds takes as long as that thread likes. ctypes' PyDLL
does not give it up.
"""

from __future__ import annotations

import os
import socket
from ctypes import PyDLL, byref, c_char, c_int, c_size_t, c_ssize_t, c_uint64, c_void_p, get_errno
from errno import EAGAIN, EINTR, ENOBUFS, ENOMEM, EWOULDBLOCK

_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_NOTHING = (EAGAIN, EWOULDBLOCK, EINTR, ENOBUFS, ENOMEM)
"""Later, perhaps. A kernel that is short of memory has not closed the connection: that alone is a fence."""

_LIBC = PyDLL(None, use_errno=True)
for _call in (_LIBC.send, _LIBC.recv):
    _call.argtypes = (c_int, c_void_p, c_size_t, c_int)
    _call.restype = c_ssize_t
_LIBC.eventfd_write.argtypes = (c_int, c_uint64)


def ring(bell: int) -> None:
    """Wake who polls this eventfd."""
    _LIBC.eventfd_write(bell, 1)


def send(fd: int, data: bytearray) -> int:
    """How many bytes were taken; 0 if there is no room now. OSError if the connection is broken."""
    return max(0, _checked(_LIBC.send(fd, byref(c_char.from_buffer(data)), len(data), _FLAGS)))


class Inbox:
    """What one read may bring, in a buffer that is used again."""

    def __init__(self, size_bytes: int) -> None:
        self._buffer = bytearray(size_bytes)
        self._view = memoryview(self._buffer)
        self._start = byref(c_char.from_buffer(self._buffer))

    def recv(self, fd: int) -> bytes | None:
        """What has arrived; None if nothing has, empty at EOF. OSError if the connection is broken."""
        size = _checked(_LIBC.recv(fd, self._start, len(self._buffer), _FLAGS))
        return None if size < 0 else bytes(self._view[:size])


def _checked(result: int) -> int:
    """A call's result, -1 if it would have waited."""
    if result < 0 and (number := get_errno()) not in _NOTHING:
        raise OSError(number, os.strerror(number))
    return result
