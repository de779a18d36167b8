"""Without vLLM the connector's module says what it needs. With one, `make e2e` tests it."""

import importlib

import pytest

from kvevents_service.errors import ConfigError


def test_without_vllm_there_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"kvevents_service.engine.vllm: expected vLLM 0.32 or 0.33"):
        importlib.import_module("kvevents_service.engine.vllm")
