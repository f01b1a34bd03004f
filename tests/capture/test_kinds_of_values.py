"""Values that no graph takes: the call that has them stays as it is, and what is within may be fused."""

import copy
import dataclasses
import json

import pytest
import torch
from support.selection import each_once
from torch import nn
from torch.ao.nn import quantized

from kfconvert import ModelConverter, load, save
from kfconvert.artifact.schema import RECORD_FILE

pytestmark = pytest.mark.filterwarnings("ignore")
X, ADJACENT = torch.randn(4, 8), torch.rand(4, 4).round()


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Graph(nn.Module):
    def __init__(self, adjacent=None):
        super().__init__()
        self.head = Head()
        self.register_buffer("adjacent", adjacent)

    def forward(self, x, adjacent=None):
        return self.head(torch.sparse.mm(self.adjacent if adjacent is None else adjacent, x))


class Around(nn.Module):
    """Its submodules, of which one has others within, receive what it receives."""

    def __init__(self):
        super().__init__()
        self.graphs = nn.ModuleList([Graph(), Graph()])

    def forward(self, x, adjacent):
        for graph in self.graphs:
            x = graph(x, adjacent)
        return x


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.linear, self.last = quantized.Quantize(0.05, 0, torch.quint8), nn.Linear(8, 8), Head()
        self.back = quantized.DeQuantize()

    def forward(self, x):
        return self.last(self.back(self.linear(self.first(x))))


def statically_quantized() -> nn.Module:
    """As by torch.ao.quantization.convert."""
    model = Quantized()
    model.linear = quantized.Linear(8, 8)
    return model


class OfQuantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.back, self.head = quantized.DeQuantize(), Head()

    def forward(self, x):
        return self.head(self.back(x))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = Head()

    def forward(self, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(ids), lengths, True, enforce_sorted=False)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0])


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.GRU(8, 8, batch_first=True), Head()

    def forward(self, packed):
        return self.head(self.recurrent(packed)[1][0])


@dataclasses.dataclass
class Batch:
    """Checks what it is made of."""

    x: torch.Tensor

    def __post_init__(self):
        assert isinstance(self.x, torch.Tensor)


torch.export.register_dataclass(Batch)


class OfBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = Head()

    def forward(self, batch):
        return self.head(batch.x)


class OfTimeStep(Head):
    def forward(self, x, step):
        return super().forward(x + step[None].to(x.device).expand(x.shape[0])[:, None])


# The whole model is captured, not only its parts.
WHOLE = ("dataclass", "tensor without dimensions")
CASES = {
    "sparse argument": (Graph, (X, ADJACENT.to_sparse())),
    "compressed argument": (Graph, (X, ADJACENT.to_sparse_csr())),
    "sparse buffer": (lambda: Graph(ADJACENT.to_sparse()), (X,)),
    "argument of submodules in blocks": (Around, (X, ADJACENT.to_sparse_bsr((2, 2)))),
    "quantized within": (statically_quantized, (X,)),
    "quantized argument": (OfQuantized, (torch.quantize_per_tensor(X, 0.05, 0, torch.quint8),)),
    "packed within": (Packed, (torch.randint(0, 20, (3, 6)), torch.tensor([6, 4, 2]))),
    "packed argument": (Sequences, (nn.utils.rnn.pack_sequence([torch.randn(4, 8), torch.randn(2, 8)]),)),
    "dataclass": (OfBatch, (Batch(X),)),
    "tensor without dimensions": (OfTimeStep, (X, torch.tensor(7))),
}


@each_once(effort=("fast", "full"), name=CASES)
def test_what_is_within_may_be_fused(name, effort):
    make, example = CASES[name]
    model = make().eval()
    fused = ModelConverter(select="all", effort=effort).convert_model(copy.deepcopy(model), example_inputs=example)
    with torch.no_grad():
        torch.testing.assert_close(fused(*example), model(*example))
    info = fused.kfconvert_info()
    served = [info["guard"]] if name in WHOLE else [*info["parts"].values()]
    assert served and all(each == {"hits": 1, "misses": {}} for each in served)


SAVED = ("compressed argument", "argument of submodules in blocks", "quantized argument")


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_does_not_tell_of_them_as_of_other_tensors(name, tmp_path):
    make, example = CASES[name]
    model = make().eval()
    save(ModelConverter(select="all").convert_model(copy.deepcopy(model), example_inputs=example), tmp_path)
    assert json.loads((tmp_path / RECORD_FILE).read_text())["statistics"]["example"] is None
    fused = load(tmp_path, model=make())
    with torch.no_grad():
        torch.testing.assert_close(fused(*example), model(*example))
    assert fused.kfconvert_info()["parts"]


class Chosen(Head):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (super().forward(x),))


def test_a_branch_that_dynamo_runs():
    model = Chosen().eval()
    converter = ModelConverter(select="all")
    fused = converter.convert_model(copy.deepcopy(model), example_inputs=X)
    for x in (X, -X):
        with torch.no_grad():
            torch.testing.assert_close(fused(x), model(x))
    assert "HigherOrderOp" in converter.conversion_stats["regions"][0]["reason"]
