"""Names of the places a block can be in (`medium`), and one spelling for each.

vLLM 0.33 sends GPU, CPU and STORAGE. The other names are what SGLang and LMCache send and what NVIDIA Dynamo
reads. Case never matters here, though it does at some consumers.
"""

from __future__ import annotations

from typing import Final

MEDIUM_GPU: Final = "GPU"
MEDIUM_CPU: Final = "CPU"
MEDIUM_STORAGE: Final = "STORAGE"
MEDIUM_EXTERNAL: Final = "EXTERNAL"

_SPELLINGS: Final = {
    MEDIUM_GPU: ("", "GPU", "DEVICE"),
    MEDIUM_CPU: ("CPU", "CPU_PINNED", "CPU_TIER1"),
    MEDIUM_STORAGE: ("STORAGE", "DISK", "NVME", "CPU_TIER2"),
    MEDIUM_EXTERNAL: ("EXTERNAL", "REMOTE", "NETWORK", "SHARED"),
}
_CANONICAL: Final = {name: medium for medium, names in _SPELLINGS.items() for name in names}

KNOWN_MEDIA: Final = frozenset(_SPELLINGS)
"""The media `canonical_medium` knows; any other result is a tier of the publisher's own."""


def canonical_medium(medium: str | None) -> str:
    """One name for each tier, so that a removal meets its store however either is spelled.

    None and "" are GPU: publishers older than tiers sent nothing else. An unknown name is a tier of its own,
    upper-cased, and never taken for GPU. Raises nothing.
    """
    name = (medium or "").upper()
    return _CANONICAL.get(name, name)
