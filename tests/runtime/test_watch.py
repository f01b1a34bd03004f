"""Watched dicts and gathered places: compiled and in Python alike."""

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kfconvert.runtime.state import watch
from kfconvert.runtime.state.watch import CODE, ITEMS, MISSING, SIZE, TYPE, Places, Watch


def test_writes_of_any_kind_are_seen_after_a_check():
    module, value = nn.Module(), [1, 2]
    module.held = value
    entries = [(module, "held", value), (module, "training", True), (module, "forward", MISSING),
               (module._modules, SIZE, 0)]  # fmt: skip
    watched = Watch(entries)
    for index, write, undo in (
        (0, lambda: setattr(module, "held", [1, 2]), lambda: setattr(module, "held", value)),
        (0, lambda: delattr(module, "held"), lambda: setattr(module, "held", value)),
        (1, lambda: module.__dict__.update(training=False), module.train),
        (2, lambda: setattr(module, "forward", None), lambda: delattr(module, "forward")),
        (2, lambda: setattr(module, "forward", MISSING), lambda: delattr(module, "forward")),
        (3, lambda: module.add_module("child", nn.Module()), lambda: delattr(module, "child")),
    ):
        assert watched.first_change() is None and watched.first_change() is None
        write()
        assert watched.first_change() == index
        undo()
    assert Watch([]).first_change() is None


def test_a_value_that_is_the_same_is_watched_from_then_on():
    store, items = {"a": 1.5, "b": [2]}, [3.5]
    places = Places(
        [((store, "a", store["a"]), "a"), ((store, "b", store["b"]), "b"), ((items, ITEMS, (*items,)), "c")]
    )
    for _ in range(2):
        store["a"], store["b"], items[0] = float("1.5"), [2], float("3.5")
        assert places.change() is None
    for write, reason in (
        (lambda: items.append(4), "c"),
        (lambda: store.update(b=[3]), "b"),
        (lambda: store.update(a=2.5), "a"),
    ):
        write()
        assert places.change() == reason


@pytest.mark.parametrize("entry", [({}, [], 1), ({"a": 1}, SIZE, "one"), (3, "a", 1)], ids=repr)
def test_impossible_entries(entry):
    with pytest.raises(TypeError):
        Watch([entry]).first_change()


def structure(model):
    for module in model.modules():
        yield module._modules, SIZE, len(module._modules)
        for name, child in module._modules.items():
            yield module._modules, name, child
        yield module, "forward", MISSING
        yield module, "training", False


CHANGES = {
    "add": lambda model: model[1].add_module("extra", nn.ReLU()),
    "patch": lambda model: setattr(model[0], "forward", nn.Identity()),
    "train": lambda model: model[1][1].train(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_watches_the_copies(change, duplicate):
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Dropout())).eval()
    model.kept = Watch(structure(model))
    before, _ = duplicate(model), model.kept.first_change()
    twin = duplicate(model)
    change(model)
    index = model.kept.first_change()
    assert index is not None and twin.kept.first_change() is None and before.kept.first_change() is None
    change(twin)
    assert twin.kept.first_change() == index
    # A copy of what has changed already has changed as well.
    assert copy.deepcopy(twin).kept.first_change() == index


KEYS = st.sampled_from(["a", "b", "forward", "training", 1])
VALUES = [object(), object(), None, True]
MARKS = (MISSING, SIZE, ITEMS, TYPE, CODE)
OBJECTS = [test_impossible_entries, structure]
ABOUT_OBJECTS = {
    TYPE: [type(each) for each in (*OBJECTS, VALUES)],
    CODE: [each.__code__ for each in OBJECTS],
    ITEMS: [(), (VALUES[0],), tuple(VALUES)],
}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.dictionaries(KEYS, st.integers(0, 3)), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.integers(0, 2), st.one_of(KEYS, st.sampled_from([SIZE, TYPE, CODE, ITEMS])), st.integers(0, 4)),
        max_size=6,
    ),
)
def test_compiled_and_python_agree(dicts, wanted):
    if not watch.COMPILED:
        pytest.skip("kfconvert._C was not built for this Python")
    stores = [{key: VALUES[index] for key, index in content.items()} for content in dicts]
    lists = [VALUES[:index] for index in range(3)]
    flat = []
    for place, key, index in wanted:
        if key in ABOUT_OBJECTS:
            holders = lists if key is ITEMS else OBJECTS
            expected = ABOUT_OBJECTS[key][index % len(ABOUT_OBJECTS[key])]
        else:
            holders, expected = stores, index if key is SIZE else [*VALUES, MISSING][index]
        flat += holders[place % len(holders)], key, expected
    from kfconvert import _C

    entries = tuple(flat)
    state = _C.watch_state(entries)
    expected = watch.first_change_in_python(entries, None, None, *MARKS)
    assert watch.no_state(entries) is None
    for _ in range(2):  # the second time, what has held is passed over
        found = _C.first_change(entries, state, None, *MARKS)
        assert (None if found == -1 else found) == expected
    places = tuple(part for store in stores for key in store for part in (store, key))
    every = [v for store in stores for v in store.values()]
    assert _C.gather(places, None) == watch.gather_in_python(places, None) == every
