"""What `kvevents doctor` finds."""

from __future__ import annotations

from typing import NamedTuple

OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Finding(NamedTuple):
    """One look at one thing. remedy: what to do about it; "" where all is well."""

    check: str
    level: str
    what: str
    remedy: str = ""


def ok(check: str, what: str) -> Finding:
    return Finding(check, OK, what)


def warning(check: str, what: str, remedy: str) -> Finding:
    return Finding(check, WARNING, what, remedy)


def problem(check: str, what: str, remedy: str) -> Finding:
    return Finding(check, PROBLEM, what, remedy)
