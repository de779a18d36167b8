"""Every error this package raises, in one tree.

KvEventsError
├── WireError          bytes from a peer that are not a valid frame, batch or event
├── ControlError       an engine message that breaks the engine protocol; answered with an `Error` message
├── ConfigError        a setting that cannot work, found at start
└── SidecarGone        the sidecar (or a publisher) cannot be reached, or went away

Each carries what it is about as attributes, so that callers never parse a message.
"""


class KvEventsError(Exception):
    """Base of all errors of this package."""


class WireError(KvEventsError):
    """Bytes that are not what the wire format allows.

    `field` names the place ("seq", "events[3].block_hashes"); `expected` says what belongs there.
    The offending content is never part of the message: it may hold prompt tokens.
    """

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(f"{field}: expected {expected}")
        self.field = field
        self.expected = expected


class ControlError(KvEventsError):
    """An engine message the sidecar refuses. `code` is stable and short, `field` names the message part."""

    def __init__(self, code: str, field: str, expected: str) -> None:
        super().__init__(f"{code}: {field}: expected {expected}")
        self.code = code
        self.field = field
        self.expected = expected


class ConfigError(KvEventsError):
    """A setting that cannot work. `setting` is its name as the user wrote it."""

    def __init__(self, setting: str, expected: str) -> None:
        super().__init__(f"{setting}: expected {expected}")
        self.setting = setting
        self.expected = expected


def expect(good: bool, setting: str, expected: str) -> None:
    """ConfigError unless the setting is good."""
    if not good:
        raise ConfigError(setting, expected)


class SidecarGone(KvEventsError):
    """The peer is away: nothing listens, it closed the connection, or it missed a deadline."""
