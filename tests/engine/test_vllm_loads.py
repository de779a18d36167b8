"""Loads hold a bounded part of the engine's blocks."""

from engine.vllm_toy import ToyVllm

from kvevents_service.engine.vllm_loads import LOADING_FRACTION


def test_hits_wait_when_loads_hold_too_much_and_go_on_when_they_have_ended() -> None:
    vllm = ToyVllm(blocks=40)
    names = [f"r{number}" for number in range(6)]
    for number, name in enumerate(names):
        vllm.add(name, range(number * 17, number * 17 + 17), 1)
        for _ in range(4):
            vllm.step()
        vllm.client.end_copies()
    vllm.step()
    assert not vllm.requests
    assert vllm.pool.reset()
    for number, name in enumerate(names):
        vllm.add(name, range(number * 17, number * 17 + 17), 1)
    vllm.schedule()
    assert list(vllm.loading) == names[:4], "16 of 40 blocks"
    assert vllm.half.loads._held_blocks == LOADING_FRACTION * 40
    assert vllm.half.find(vllm.requests["r5"], 0) is None
    vllm.client.end_copies()
    vllm.run()
    vllm.drain()
    assert vllm.half.loads.counters["loads"] == len(names)
    assert vllm.half.loads._held_blocks == 0
