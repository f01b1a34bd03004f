"""A load collects its garbage once, and leaves the collector in the state in which it was."""

import gc
import weakref

import pytest

from kfconvert.process import garbage_collected_once


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture(params=[True, False], ids=["enabled", "disabled"])
def enabled(request):
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


@pytest.fixture(params=[True, False], ids=["frozen", "not frozen"])
def frozen(request):
    before = gc.get_freeze_count() > 0
    gc.unfreeze()
    if request.param:
        gc.freeze()
    yield request.param
    gc.unfreeze()
    if before:
        gc.freeze()


def test_cycles_made_within_are_collected_at_the_end(enabled, frozen):
    with garbage_collected_once():
        cycle = weakref.ref(Cycle())
        assert cycle() is not None and not gc.isenabled()
    assert cycle() is None
    assert gc.isenabled() == enabled and bool(gc.get_freeze_count()) == frozen


def test_an_error_leaves_the_collector_as_it_was(enabled, frozen):
    with pytest.raises(KeyError), garbage_collected_once():
        raise KeyError
    assert gc.isenabled() == enabled and bool(gc.get_freeze_count()) == frozen
