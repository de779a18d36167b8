"""Metrics of tiers, copies and engines. A process without an engine socket has no samples of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from kvevents_service.service.family import Family, Reading, Samples, one, stat
from kvevents_service.service.histogram import Histogram

if TYPE_CHECKING:
    from kvevents_service.service.copy_meter import CopyMeter, Route
    from kvevents_service.service.offload_view import OffloadView
    from kvevents_service.service.tier_view import TierView

_TIER, _ROUTE = ("medium",), ("direction", "medium")
DISK_ERRORS: Final = "disk_errors_"


def _by_tier(read: Callable[[TierView], float]) -> Callable[[Reading], Samples]:
    return lambda reading: [((tier.medium,), read(tier)) for tier in _tiers(reading)]


def _tiers(reading: Reading) -> list[TierView]:
    return [] if reading.offload is None else reading.offload.tiers


def _tier_stat(key: str) -> Callable[[Reading], Samples]:
    return _by_tier(lambda tier: tier.stats.get(key, 0))


def _blocks(reading: Reading) -> Samples:
    return [((tier.medium, state), blocks) for tier in _tiers(reading) for state, blocks in tier.blocks.items()]


def _declined(reading: Reading) -> Samples:
    return [
        ((tier.medium, key.removeprefix("declined_")), blocks)
        for tier in _tiers(reading)
        for key, blocks in tier.stats.items()
        if key.startswith("declined_")
    ]


def _copies(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for route, traffic in reading.offload.meter.traffic.items() if reading.offload else ():
        yield (*route, "ok"), traffic.seconds.count - traffic.failed
        yield (*route, "failed"), traffic.failed


def _by_route(read: Callable[[CopyMeter, Route], float | Histogram]) -> Callable[[Reading], Samples]:
    def samples(reading: Reading) -> Samples:
        if reading.offload is None:
            return []
        meter = reading.offload.meter
        return [(route, read(meter, route)) for route in meter.traffic]

    return samples


def _of_offload(read: Callable[[OffloadView], float]) -> Callable[[Reading], Samples]:
    return lambda reading: [] if reading.offload is None else one(read(reading.offload))


def _disk_errors(reading: Reading) -> Samples:
    return [
        ((key.removeprefix(DISK_ERRORS),), count)
        for key, count in reading.stats.items()
        if key.startswith(DISK_ERRORS)
    ]


OFFLOAD: Final = (
    # tiers
    Family("gauge", "tier_capacity_blocks", "Slots of the tier.", _TIER, _by_tier(lambda t: t.capacity_blocks)),
    Family("gauge", "tier_block_bytes", "Bytes of a block on all ranks.", _TIER, _by_tier(lambda t: t.block_bytes)),
    Family("gauge", "tier_blocks", "Slots by state; a pinned one is counted under its state, too.",
           ("medium", "state"), _blocks),
    Family("counter", "stored_blocks", "Blocks stored and announced.", _TIER, _tier_stat("blocks_stored")),
    Family("counter", "removed_blocks", "Blocks that left.", _TIER, _tier_stat("blocks_removed")),
    Family("counter", "loaded_blocks", "Blocks copied back to an engine.", _TIER, _tier_stat("blocks_loaded")),
    Family("counter", "known_blocks", "Blocks offered that were there.", _TIER, _tier_stat("blocks_known")),
    Family("counter", "declined_blocks", "Blocks offered and not stored.", ("medium", "reason"), _declined),
    Family("counter", "demoted_blocks", "Blocks copied from host memory to the disk.", (), stat("blocks_demoted")),
    Family("counter", "promoted_blocks", "Blocks copied back from there.", (), stat("blocks_promoted")),
    Family("counter", "unsaved_blocks", "Blocks that left host memory before they were on the disk.", (),
           stat("evicted_unsaved")),
    Family("counter", "lookups", "Lookups of engines.", _TIER, _tier_stat("lookups")),
    Family("counter", "lookup_blocks", "Hash units they asked for.", _TIER, _tier_stat("lookup_blocks")),
    Family("counter", "hit_blocks", "Hash units they were granted.", _TIER, _tier_stat("hit_blocks")),
    Family("counter", "lookups_refused", "Hits that could not be granted.", _TIER, _tier_stat("lookups_refused")),
    Family("gauge", "leases", "Hits that are pinned and not loaded yet.", _TIER, _tier_stat("leases")),
    Family("counter", "leases_expired", "Hits whose engine never came back.", _TIER, _tier_stat("leases_expired")),
    # copies
    Family("counter", "copies", "Transfers that ended.", (*_ROUTE, "result"), _copies),
    Family("counter", "copied_bytes", "Bytes of those that ended well.", _ROUTE,
           _by_route(lambda meter, route: meter.traffic[route].bytes)),
    Family("histogram", "copy_seconds", "From the decision to the end on the last rank.", _ROUTE,
           _by_route(lambda meter, route: meter.traffic[route].seconds)),
    Family("gauge", "copies_pending", "Transfers under way.", _ROUTE,
           _by_route(lambda meter, route: meter.pending(route))),
    Family("gauge", "oldest_copy_seconds", "Age of the oldest one under way.", (),
           _of_offload(lambda offload: offload.meter.oldest_s)),
    # the disk
    Family("counter", "disk_errors", "Errors of the disk tier's file, by kind.", ("kind",), _disk_errors),
    Family("counter", "disk_blocks_recovered", "Blocks found again after a restart.", (),
           stat("disk_blocks_recovered")),
    Family("counter", "disk_blocks_not_kept", "Blocks that will not be found after a restart.", (),
           stat("disk_blocks_not_kept")),
    Family("counter", "disk_layouts_void", "Times that what was kept was of another layout.", (),
           stat("disk_layouts_void")),
    # engines
    Family("gauge", "engine_sessions", "Engines connected.", (), stat("sessions")),
    Family("gauge", "worker_sessions", "Workers of engines connected.", (), stat("workers")),
    Family("counter", "sessions_refused", "Peers turned away at their hello.", (),
           _of_offload(lambda offload: offload.plane.refused)),
)  # fmt: skip
