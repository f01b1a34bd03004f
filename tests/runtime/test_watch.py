"""Watched dicts and gathered places: compiled and in Python alike."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kfconvert.runtime.state import watch
from kfconvert.runtime.state.watch import CODE, ITEMS, MISSING, SIZE, TYPE, Watch, flat_places, gather


@pytest.fixture(params=["compiled", "python"])
def implementation(request, monkeypatch):
    if request.param == "compiled":
        if not watch.COMPILED:
            pytest.skip("kfconvert._C was not built for this Python")
        return
    monkeypatch.setattr(watch, "_first_change", watch.first_change_in_python)
    monkeypatch.setattr(watch, "_gather", watch.gather_in_python)
    monkeypatch.setattr(watch, "_watch_state", watch.no_state)


pytestmark = pytest.mark.usefixtures("implementation")


def test_objects_are_compared_by_identity():
    value = [1, 2]
    store = {"a": value, "b": None}
    watched = Watch([(store, "a", value), (store, "b", None)])
    assert watched.first_change() is None
    store["a"] = [1, 2]
    assert watched.first_change() == 0
    store["a"] = value
    del store["b"]
    assert watched.first_change() == 1


def test_writes_of_any_kind_are_seen_after_a_check():
    module = nn.Module()
    module.scale = 2.0
    watched = Watch([(module, "scale", module.scale), (module, "training", True), (module._modules, SIZE, 0)])
    for write, undo in (
        (lambda: setattr(module, "scale", 3.0), lambda: None),
        (lambda: module.__dict__.update(training=False), module.train),
        (lambda: module.eval(), module.train),
        (lambda: module.add_module("child", nn.Module()), lambda: delattr(module, "child")),
        (lambda: delattr(module, "scale"), lambda: None),
    ):
        watched = Watch([(module, "scale", module.scale), *watched.entries[1:]])
        assert watched.first_change() is None and watched.first_change() is None
        write()
        assert watched.first_change() is not None
        undo()


def test_absent_keys():
    store = {}
    watched = Watch([(store, "forward", MISSING), (store, "other", MISSING)])
    assert watched.first_change() is None
    store["other"] = None
    assert watched.first_change() == 1
    store["forward"] = MISSING
    assert watched.first_change() == 0


def test_numbers_of_items():
    first, second = {"a": 1}, {}
    watched = Watch([(first, SIZE, 1), (second, SIZE, 0)])
    assert watched.first_change() is None
    second["hook"] = print
    assert watched.first_change() == 1
    first.clear()
    assert watched.first_change() == 0


def test_nothing_to_watch():
    assert Watch([]).first_change() is None


def test_keys_are_compared_by_value_and_may_be_no_strings():
    store = {"".join(["for", "ward"]): 1, 3: 2, ("a", 1): 3}
    watched = Watch([(store, "forward", store["forward"]), (store, 3, store[3]), (store, ("a", 1), store["a", 1])])
    assert watched.first_change() is None


def test_attributes_of_objects():
    module = nn.Dropout().eval()
    watched = Watch([(module, "training", False), (module, "forward", MISSING)])
    assert watched.first_change() is None
    module.forward = lambda x: x
    assert watched.first_change() == 1
    del module.forward
    assert watched.first_change() is None
    module.train()
    assert watched.first_change() == 0


def test_kinds_of_entries_that_are_about_the_object_itself():
    def function():
        return 1

    module, items, table = nn.Dropout(), [1, 2], {"a": 1, "b": 2}
    watched = Watch(
        [(module, TYPE, nn.Dropout), (items, ITEMS, (1, 2)), (table, ITEMS, ("a", "b")),
         (function, CODE, function.__code__)]
    )  # fmt: skip
    assert watched.first_change() is None
    function.__code__ = (lambda: 2).__code__
    assert watched.first_change() == 3
    table["a"] = table.pop("a")
    assert watched.first_change() == 2
    items.append(3)
    assert watched.first_change() == 1
    module.__class__ = nn.Dropout2d
    assert watched.first_change() == 0


@pytest.mark.parametrize("entry", [({}, [], 1), ({"a": 1}, SIZE, "one"), (3, "a", 1)], ids=repr)
def test_impossible_entries(entry):
    if entry[1] is SIZE and watch._first_change is watch.first_change_in_python:
        assert Watch([entry]).first_change() == 0
    else:
        with pytest.raises(TypeError):
            Watch([entry]).first_change()


def test_what_is_watched_stays_alive_and_cycles_are_collected():
    class Value:
        pass

    value = Value()
    store = {"a": value}
    store["watch"] = watched = Watch([(store, "a", value)])
    assert watched.first_change() is None
    store["a"] = None
    alive = weakref.ref(value)
    del value
    gc.collect()
    assert alive() is not None and watched.first_change() == 0
    del store, watched
    gc.collect()
    assert alive() is None


class Meddler:
    """A key with the hash of another; comparing the two empties the dict that they are in."""

    def __init__(self, store):
        self.store = store

    def __hash__(self):
        return hash("a")

    def __eq__(self, other):
        self.store.clear()
        return False


def test_dicts_that_change_while_they_are_looked_at():
    value, store = object(), {}
    store[Meddler(store)] = object()
    watched = Watch([(store, "a", value), (store, "b", value)])
    for _ in range(3):
        assert watched.first_change() == 0
    store[Meddler(store)] = object()
    with pytest.raises(KeyError):
        gather(flat_places([(store, "a")]))


def structure(model):
    for module in model.modules():
        yield module._modules, SIZE, len(module._modules)
        for name, child in module._modules.items():
            yield module._modules, name, child
        yield module, "forward", MISSING
        yield module, "training", False


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Dropout())).eval()
    model.kept = Watch(structure(model))
    return model


def add(model):
    model[1].add_module("extra", nn.ReLU())


def replace(model):
    model[1][0] = nn.GELU()


def patch(model):
    model[0].forward = nn.Identity()


def train(model):
    model[1][1].train()


@pytest.mark.parametrize("change", [add, replace, patch, train])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("checked_before", [False, True])
def test_a_copy_watches_the_copies(model, change, duplicate, checked_before):
    if checked_before:
        assert model.kept.first_change() is None
    twin = duplicate(model)
    change(model)
    index = model.kept.first_change()
    assert index is not None and twin.kept.first_change() is None
    change(twin)
    assert twin.kept.first_change() == index
    # A copy of what has changed already has changed as well.
    assert copy.deepcopy(twin).kept.first_change() == index


KEYS = st.sampled_from(["a", "b", "forward", "training", 1])
VALUES = [object(), object(), None, True]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.dictionaries(KEYS, st.integers(0, 3)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.one_of(KEYS, st.just(SIZE)), st.integers(0, 4)), max_size=6),
)
def test_compiled_and_python_agree(dicts, wanted):
    if not watch.COMPILED:
        pytest.skip("kfconvert._C was not built for this Python")
    stores = [{key: VALUES[index] for key, index in content.items()} for content in dicts]
    flat = []
    for place, key, index in wanted:
        expected = index if key is SIZE else [*VALUES, MISSING][index]
        flat += stores[place % len(stores)], key, expected
    from kfconvert import _C

    entries, marks = tuple(flat), (None, MISSING, SIZE, ITEMS, TYPE, CODE)
    state = _C.watch_state(entries)
    expected = watch.first_change_in_python(entries, None, *marks)
    for _ in range(2):  # the second time, what has held is passed over
        found = _C.first_change(entries, state, *marks)
        assert (None if found == -1 else found) == expected
    places = tuple(part for store in stores for key in store for part in (store, key))
    every = [v for store in stores for v in store.values()]
    assert _C.gather(places, None) == watch.gather_in_python(places, None) == every


def test_gather_takes_what_is_there_now():
    first, second = nn.Linear(2, 3), nn.Linear(2, 3, bias=False)
    places = flat_places([(first._parameters, "weight"), (second._parameters, "bias")])
    weight, bias = gather(places)
    assert weight is first.weight and bias is None
    first.weight = nn.Parameter(torch.ones(3, 2))
    assert gather(places)[0] is first.weight
    assert gather(()) == []
    del first.weight
    with pytest.raises(KeyError, match="weight"):
        gather(places)
