"""The log of `kvevents serve`: lines on stderr, as text or one JSON object each. No line has token ids."""

from __future__ import annotations

import json
import logging
import time
import traceback
from types import TracebackType
from typing import IO, Final

from kvevents_service.errors import KvEventsError
from kvevents_service.service.rarely import RateLimit

LOGGER: Final = "kvevents_service"
TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

ErrorInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

limit: Final = RateLimit(time.monotonic)
"""What every line of this process passes."""


class Formatter(logging.Formatter):
    """Lines of text. An error is said with its words only where they are ours or the system's."""

    def formatException(self, ei: ErrorInfo) -> str:
        """Where it was raised and what it is; another's words might quote a prompt."""
        _, error, trace = ei
        words = f": {error}" if isinstance(error, KvEventsError | OSError) else ""
        return "".join([*traceback.format_tb(trace), f"{type(error).__name__}{words}"])


class JsonFormatter(Formatter):
    """ts in seconds since the epoch, level, logger, message, `error`, and what `extra` has under `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str, log_format: str, stream: IO[str]) -> None:
    """Write what this process logs to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else Formatter(TEXT_FORMAT))
    handler.addFilter(limit)
    logging.basicConfig(level=level.upper(), handlers=[handler])
