"""The table of scripts/tune_kernels.py: what it tries and what it writes; timing needs a GPU."""

import importlib
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("tune_kernels")


def entries(text, macro, count):
    body = text.partition(f"#define {macro}(SHAPE)")[2].partition("\n\n")[0]
    found = re.findall(r"SHAPE\(([^)]*)\)", body)
    assert found and all(len(entry.split(", ")) == count for entry in found)
    return [tuple(entry.split(", ")) for entry in found]


def test_the_table_that_is_built_holds_every_row(tune):
    text = tune.HEADER.read_text()
    tried = {(int(threads), int(items), early) for threads, items, early in entries(text, "KFC_ROW_CANDIDATES", 3)}
    assert tried == set(tune.all_candidates())
    for elements in tune.DTYPES:
        shapes = entries(text, f"KFC_ROW_SHAPES_{elements}", 5)
        for packs, few, threads, items, early in shapes:
            assert few in ("true", "false") and int(threads) * int(items) >= int(packs)
            assert (int(threads), int(items), early) in tune.candidates(int(packs), elements)
        for_all = [int(packs) for packs, few, *_ in shapes if few == "false"]
        assert for_all == sorted(for_all) and for_all[-1] == max(tune.PACKS)


def test_candidates_hold_the_row_and_waste_no_item(tune):
    for packs, elements in itertools.product(tune.PACKS, tune.DTYPES):
        shapes = tune.candidates(packs, elements)
        assert shapes and len(set(shapes)) == len(shapes)
        for threads, items, early in shapes:
            assert threads * items >= packs and (items == 1 or threads * (items - 1) < packs)
            held = items * elements
            assert held > tune.ALWAYS_EARLY if early == "false" else early == "true" and held < tune.NEVER_EARLY


def test_rows_share_a_shape_where_that_costs_no_operator_much(tune):
    few = {"a": [1.0, 1.0], "b": [1.04, 1.04]}
    assert tune.entries(8, few, {"a": [1.0, 1.0], "b": [1.0, 1.0]}) == [(8, "false", *"a")]
    # On the whole "b" is best for both, and few rows lose 2 %; but an operator of theirs loses 12 %.
    few = {"a": [1.0, 1.06], "b": [1.12, 0.97]}
    many = {"a": [1.5, 1.5], "b": [1.0, 1.0]}
    assert tune.entries(8, few, many) == [(8, "true", *"a"), (8, "false", *"b")]


def test_written_table(tune, monkeypatch):
    monkeypatch.setattr(tune.torch.cuda, "get_device_name", lambda: "a GPU")

    def slowness(elements, packs, few, log):  # the first is best for few rows, the last for many
        shapes = tune.candidates(packs, elements)
        return {shape: [1 + abs(i - (0 if few else len(shapes) - 1))] for i, shape in enumerate(shapes)}

    monkeypatch.setattr(tune, "slowness", slowness)
    text = tune.text({elements: tune.table(elements, log=None) for elements in tune.DTYPES})
    assert "one a GPU" in text
    for elements in tune.DTYPES:
        shapes = entries(text, f"KFC_ROW_SHAPES_{elements}", 5)
        lengths = [int(packs) for packs, *_ in shapes]
        assert sorted(set(lengths)) == list(tune.PACKS)
        for packs in set(lengths):  # one entry, or that of few rows and then that of all
            kinds = [few for length, few, *_ in shapes if int(length) == packs]
            assert kinds in (["false"], ["true", "false"])
