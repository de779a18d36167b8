"""One name for a tier, however it is spelled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.wire.media import KNOWN_MEDIA, canonical_medium

SPELLINGS = {
    "GPU": [None, "", "gpu", "GPU", "Gpu", "device", "DEVICE"],
    "CPU": ["cpu", "CPU", "cpu_pinned", "CPU_PINNED", "cpu_tier1"],
    "STORAGE": ["storage", "STORAGE", "disk", "DISK", "NVMe", "cpu_tier2"],
    "EXTERNAL": ["external", "REMOTE", "network", "Shared"],
    "CXL_POOL": ["cxl_pool", "CXL_POOL"],
}


@pytest.mark.parametrize(("medium", "name"), [(m, name) for name, media in SPELLINGS.items() for m in media])
def test_spelling(medium: str | None, name: str) -> None:
    assert canonical_medium(medium) == name


def test_every_vector_medium_is_known() -> None:
    assert {"GPU", "CPU", "STORAGE", "EXTERNAL"} == KNOWN_MEDIA


@given(st.text())
def test_only_its_own_names_are_gpu(medium: str) -> None:
    name = canonical_medium(medium)
    assert (name == "GPU") == (medium.upper() in ("", "GPU", "DEVICE"))
    assert canonical_medium(medium.swapcase()) in (name, medium.swapcase().upper())
