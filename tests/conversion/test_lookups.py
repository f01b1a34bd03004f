"""Lookups by inputs that nobody gave: longer ones, and such with other values, may ask for more rows than there are."""

import contextlib
import copy
import sys

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from kfconvert import ModelConverter
from kfconvert.inputs.lookups import BoundedLookups

TABLE = torch.arange(12.0).reshape(4, 3)
LOOKUPS = {
    "embedding": lambda ids: nn.functional.embedding(ids, TABLE),
    "index": lambda ids: TABLE[ids],
    "index of the second dimension": lambda ids: TABLE.T[:, ids],
    "index_select": lambda ids: TABLE.index_select(0, ids),
    "gather": lambda ids: TABLE.gather(0, ids[:, None]),
    "scatter": lambda ids: TABLE.scatter(0, ids[:, None], 1.0),
    "scatter_add": lambda ids: TABLE.scatter_add(0, ids[:, None], TABLE[:1].repeat(len(ids), 1)),
    "index_add": lambda ids: TABLE.index_add(0, ids, TABLE[:1].repeat(len(ids), 1)),
    "index_put": lambda ids: TABLE.index_put((ids,), torch.tensor(1.0)),
    "index_select of columns": lambda ids: TABLE.T.index_select(1, ids),
    "gather of columns": lambda ids: TABLE.T.gather(-1, ids[None]),
    "index_fill of columns": lambda ids: TABLE.T.index_fill(1, ids, 2.0),
    "index beside a mask": lambda ids: TABLE.T[None][:, TABLE.T[:, 0] > 0][:, :, ids],
    "index behind a mask of two dimensions": lambda ids: TABLE[None][TABLE[None, :, 0] >= 0][ids],
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_out_of_range_is_an_error(name):
    lookup = LOOKUPS[name]
    with BoundedLookups():
        assert torch.equal(lookup(torch.tensor([3, 0])), lookup(torch.tensor([3, 0])))
        with pytest.raises(IndexError, match="index 4 is out of range for 4"):
            lookup(torch.tensor([1, 4]))
        below = -5 if name.split()[0] in ("index", "index_put") else -1  # there, numbers below 0 count from the end
        with pytest.raises(IndexError, match=f"index {below} is out of range for 4"):
            lookup(torch.tensor([1, below]))
        lookup(torch.tensor([], dtype=torch.long))
        assert torch.equal(TABLE[TABLE[:, 0] > 2], TABLE[1:])
        assert torch.equal(TABLE[torch.tensor([-4])], TABLE[:1])


class TwoTables(nn.Module):
    """Columns of indices into tables of different sizes."""

    def __init__(self):
        super().__init__()
        self.many, self.few, self.linear = nn.Embedding(1000, 16), nn.Embedding(10, 16), nn.Linear(16, 16)

    def forward(self, ids):
        return torch.relu(self.linear(self.many(ids[:, 0]) + self.few(ids[:, 1])))


MODELS = {
    "at its longest": lambda: (
        GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, n_positions=32, vocab_size=100, use_cache=False)),
        torch.randint(0, 100, (2, 32)),
    ),
    "columns of other ranges": lambda: (TwoTables(), torch.tensor([[999, 3], [500, 9], [10, 1]])),
}


def test_prompts_leave_room_for_new_tokens():
    """What ``generate`` is tried with: an example as long as the table of positions has no place for another token."""
    model, ids = MODELS["at its longest"]()
    model.config.use_cache = model.generation_config.use_cache = True
    converter = ModelConverter(new_tokens=4, effort="fast")
    fused = converter.convert_model(model, example_inputs={"input_ids": ids})
    assert converter.conversion_stats["generation"]["prompt"] == [2, 28]
    generated = fused.generate(ids[:, :20], max_new_tokens=8, do_sample=False)
    assert torch.equal(generated, model.generate(ids[:, :20], max_new_tokens=8, do_sample=False))
    assert not fused.kfconvert_info()["guard"]["misses"]


@pytest.mark.exhaustive
def test_lookups_out_of_range_are_within_bounds(monkeypatch):
    """On a GPU others are assertions on the device: of a model, and of graphs for sizes that they do not fit."""
    within, beyond = [], []

    @contextlib.contextmanager
    def noted(tensors):
        within.append(True)
        try:
            yield
        finally:
            within.pop()

    def called(operator, *args, **kwargs):
        try:
            return call(operator, *args, **kwargs)
        except IndexError as error:
            if not within:
                beyond.append(f"{operator}: {error}")
            raise

    call = torch._ops.OpOverload.__call__
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", called)
    for name, module in list(sys.modules.items()):
        if name.startswith("kfconvert.") and "bounded_lookups" in vars(module):
            monkeypatch.setattr(module, "bounded_lookups", noted)
    model, ids = MODELS["at its longest"]()
    model.config.use_cache = model.generation_config.use_cache = True
    ModelConverter(select="all", new_tokens=4).convert_model(model, example_inputs={"input_ids": ids})
    assert not beyond


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODELS)
def test_a_conversion_does_not_look_beyond_tables(name):
    torch.manual_seed(0)
    model, ids = MODELS[name]()
    model, ids = model.cuda().eval(), ids.cuda()
    fused = ModelConverter(select="all").convert_model(
        copy.deepcopy(model), example_inputs={"input_ids": ids} if "longest" in name else ids
    )
    with torch.no_grad():
        for one, other in zip(torch.utils._pytree.tree_leaves(fused(ids)), torch.utils._pytree.tree_leaves(model(ids))):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    torch.cuda.synchronize()
