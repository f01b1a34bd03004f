"""What a conversion by record makes of the decisions that it is given."""

import copy
import itertools

import pytest
import torch
from support.selection import exhaustive
from torch import nn

from kfconvert import ModelConverter, load, save
from kfconvert.artifact.replay import replay
from kfconvert.inputs import spec as input_spec

INPUTS = torch.randn(3, 8)


class Three(nn.Module):
    """Three sites of one pattern in one module, which the record tells apart by their order alone."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(3))

    def forward(self, x):
        for weight in self.weights:
            x = torch.relu(nn.functional.linear(x, weight))
        return x


@pytest.fixture(scope="module")
def record():
    """(the statistics of a conversion, its call)"""
    converter = ModelConverter(select="all")
    converter.convert_model(Three().eval(), example_inputs=INPUTS)
    return converter.conversion_stats, input_spec.described({"x": INPUTS})


@pytest.mark.filterwarnings("ignore:kfconvert fused nothing")
@pytest.mark.parametrize("applied", list(itertools.product([True, False], repeat=3)))
def test_sites_of_one_module_get_their_own_decisions(record, applied):
    statistics = copy.deepcopy(record[0])
    assert [site["module"] for site in statistics["sites"]] == [""] * 3
    for index, (site, keep) in enumerate(zip(statistics["sites"], applied)):
        rejected = {"status": "rejected", "strategy": None, "reason": str(index)}
        site |= {"original_us": float(index)} if keep else rejected
    model = Three().eval()
    replayed = replay(copy.deepcopy(model), torch.device("cpu"), [record[1]], [], statistics)
    sites = replayed.kfconvert_info()["sites"]
    assert [site["status"] == "applied" for site in sites] == list(applied)
    assert [site["reason"] for site in sites] == [None if keep else str(i) for i, keep in enumerate(applied)]
    assert all(site["original_us"] == index for index, site in enumerate(sites) if applied[index])
    torch.testing.assert_close(replayed(INPUTS), model(INPUTS))


class OwnCall(nn.Module):
    """As layers of transformers have one."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)

    def forward(self, x):
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))


class InParts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layers = nn.Embedding(50, 16), nn.ModuleList([OwnCall(), OwnCall()])

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x) if x.sum().item() < 1e9 else x  # values decide
        return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(torch.float64)], ids=str)
def test_parts_of_a_model_that_was_cast_before_it_was_saved(dtype, tmp_path):
    ids = torch.randint(0, 50, (2, 9))
    fused = ModelConverter(select="all", effort="fast").convert_model(InParts().eval(), example_inputs=ids).to(dtype)
    loaded = load(save(fused, tmp_path / "cast"), model=InParts)
    with torch.no_grad():
        found, expected = loaded(ids), InParts().eval().to(dtype)(ids)
    assert loaded.kfconvert_info()["parts"] and found.dtype is dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("can", [False, True], ids=["without a GPU", "with one"])
def test_calls_are_recorded_where_they_were_and_can_be(record, can, recorded, monkeypatch):
    """What was faster launched, or was asked for so, is not recorded because the device could."""
    monkeypatch.setattr("kfconvert.artifact.replay.can_record", lambda device: can)
    statistics, call = copy.deepcopy(record)
    statistics["cuda_graphs"]["enabled"] = recorded
    model = replay(Three().eval(), torch.device("cpu"), [call], [], statistics)
    assert model.kfconvert_info()["cuda_graphs"]["enabled"] is (can and recorded)
