"""Every test of the runtime runs on poisoned pages: what was not written reads as NaN."""

import pytest


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_POISON", "1")
