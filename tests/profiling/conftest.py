"""The copies that bandwidths are compared with are small here."""

import pytest

from kfconvert.profiling import bandwidth


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setattr(bandwidth, "COPY_BYTES", 2**20)
    bandwidth._measured.cache_clear()
    yield
    bandwidth._measured.cache_clear()
