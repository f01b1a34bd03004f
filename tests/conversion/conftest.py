"""What the tests of conversions have in common."""

import gc

import pytest


@pytest.fixture
def nothing_frozen():
    """Other tests freeze what is there, which the conversions in them leave alone."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()
