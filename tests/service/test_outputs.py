"""An output sends now or never, and counts what it could not, and what held it up."""

import zmq

from kvevents_service.service.outputs import HELD_S, Output
from kvevents_service.testing import ManualClock


class SlowSocket:
    """Takes so long for each send of `takes_s`; a negative time refuses."""

    def __init__(self, clock: ManualClock, takes_s: list[float]) -> None:
        self._clock = clock
        self._takes_s = iter(takes_s)

    def send(self, frame: bytes, flags: int, **options: bool) -> None:
        assert flags & zmq.NOBLOCK
        if flags & zmq.SNDMORE:
            return
        takes_s = next(self._takes_s)
        self._clock.advance(abs(takes_s))
        if takes_s < 0:
            raise zmq.Again


def test_sends_that_were_held_up_are_counted_taken_or_not() -> None:
    clock = ManualClock(5.0)
    takes_s = [0.0, HELD_S, 2 * HELD_S, -2 * HELD_S, -HELD_S / 2]
    output = Output(SlowSocket(clock, takes_s), clock=clock)  # type: ignore[arg-type]
    for seq in range(len(takes_s)):
        output.send(seq, [b"x"])
    assert (output.sent, output.refused, output.held) == (3, 2, 2)
