"""When a source is there, gone, asked and back."""

from __future__ import annotations

from kvevents_service.core.presence import Look, Presence


def look(presence: Presence, now: float, **said: bool) -> Look:
    return presence.look(now, **({"connected": True, "stale": False, "asking": False, "heard": False} | said))


def test_one_that_never_came_is_not_gone() -> None:
    presence = Presence(1.0)
    assert look(presence, 0.0, connected=False) is Look.NOTHING
    assert look(presence, 100.0, connected=False) is Look.NOTHING
    assert look(presence, 101.0) is Look.NOTHING


def test_a_lost_connection_is_given_a_while() -> None:
    presence = Presence(1.0)
    look(presence, 0.0)
    assert look(presence, 1.0, connected=False) is Look.NOTHING
    assert look(presence, 1.9, connected=False) is Look.NOTHING
    assert look(presence, 2.0, connected=False) is Look.HIDE
    assert presence.away
    assert look(presence, 3.0, connected=False) is Look.NOTHING


def test_one_that_is_back_is_asked_and_shown_when_it_has_answered() -> None:
    presence = Presence(1.0)
    look(presence, 0.0)
    look(presence, 1.0, connected=False)
    look(presence, 2.0, connected=False)
    assert look(presence, 3.0, heard=True) is Look.ASK, "what was heard may be older than the connection"
    assert look(presence, 3.1, asking=True, heard=True) is Look.NOTHING
    assert look(presence, 3.2) is Look.SHOW
    assert look(presence, 3.3) is Look.NOTHING


def test_one_that_is_back_at_once_is_asked_all_the_same() -> None:
    presence = Presence(1.0)
    look(presence, 0.0)
    look(presence, 1.0, connected=False)
    assert look(presence, 1.1) is Look.ASK
    assert not presence.away


def test_one_that_says_nothing_stays_away() -> None:
    presence = Presence(1.0)
    look(presence, 0.0)
    look(presence, 1.0, connected=False)
    look(presence, 2.0, connected=False)
    look(presence, 3.0)
    assert look(presence, 9.0) is Look.NOTHING
    assert presence.away


def test_silence_hides_and_a_message_shows() -> None:
    presence = Presence(1.0)
    look(presence, 0.0, heard=True)
    assert look(presence, 5.0, stale=True) is Look.HIDE
    assert look(presence, 6.0, stale=True) is Look.NOTHING
    assert look(presence, 7.0, heard=True) is Look.SHOW
