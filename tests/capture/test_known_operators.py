"""What a trace remembers of operators and sizes changes neither the graph, nor its storages, nor its guard."""

import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from kfconvert.capture import trace, tracer
from kfconvert.inputs import ExampleCall

LAYERS = 4


class Attention(nn.Module):
    """Views, a split, a softmax with a mask, and operators that return their argument without a word."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.dropout = nn.Dropout()

    def forward(self, x, mask):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(mask, -1e9)
        y = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).contiguous().view(batch, length, 16)
        z = self.out(y)
        return x + self.dropout(z).to(x.dtype) + z


class Sizes(nn.Module):
    """Free sizes become numbers of other operators, and are compared; a constant stands beside other tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, mask):
        batch, length, width = x.shape
        positions = torch.arange(length, device=x.device).view(1, -1, 1).expand(batch, length, width)
        half = torch.cat((torch.tensor([]), x[..., width // 2 :], -x[..., : width // 2]), dim=-1)
        if length < 100:
            half = half * (positions + length // 2)
        turned = x[..., 0].reshape(length, batch).reshape(batch, length).reshape(length, batch).T[..., None]
        return nn.functional.gelu(self.linear(half + turned)).flatten(0, 1).unflatten(0, (batch, length))


class Writes(nn.Module):
    """Writes in place, to views too, and enables and disables gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, mask):
        with torch.no_grad():
            y = self.linear(x)
            y[:, 0].mul_(2.0)
        with torch.enable_grad():
            z = y.relu().add_(x)
        with torch.autocast("cpu", torch.bfloat16):
            return z + self.linear(z).float() + z.chunk(2, -1)[0].repeat(1, 1, 2)


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(20, 16), nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, input_ids):
        x, length = self.embedding(input_ids), input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def told(region):
    """All of a region that a trace decides, but for the names of its nodes."""
    numbers = {node: index for index, node in enumerate(region.graph.nodes)}
    storages: dict[int, int] = {}
    lines = []
    for node, number in numbers.items():
        inputs = torch.fx.map_arg((node.args, node.kwargs), lambda other: f"%{numbers[other]}")
        line = [f"%{number} {node.op} {node.target if node.op != 'placeholder' else ''} {inputs}"]
        value = node.meta.get("val")
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, torch.Tensor):
                storage = storages.setdefault(each.untyped_storage()._cdata, len(storages))
                line.append(f"{each.dtype} {tuple(each.shape)} {each.stride()} {each.storage_offset()} of {storage}")
            else:
                line.append(str(each))
        lines.append(" ".join(line))
    guard = {name: str(value) for name, value in vars(region.guard).items()}
    modules = {node.meta["nn_module_stack"].__repr__() for node in numbers if "nn_module_stack" in node.meta}
    return lines, guard, region.reads, modules


@contextmanager
def counted(monkeypatch):
    """How often the tracer works something out."""
    count, own = [0], FakeTensorMode.dispatch

    def dispatch(self, *args, **kwargs):
        count[0] += 1
        return own(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(FakeTensorMode, "dispatch", dispatch)
        yield count


@pytest.mark.parametrize("kind", [Attention, Sizes, Writes])
def test_a_trace_is_the_same(kind, monkeypatch):
    model, call = Stack(kind).eval(), ExampleCall((torch.randint(20, (2, 6)),), {})
    with counted(monkeypatch) as ours:
        known = told(trace(model, call))
    with counted(monkeypatch) as theirs, monkeypatch.context() as patch:
        for name in ("known_operators", "known_sizes", "lean_graphs"):
            patch.setattr(tracer, name, lambda *args: nullcontext())
        assert told(trace(model, call)) == known
    assert ours[0] < theirs[0]


def test_nothing_of_it_stays():
    kept = torch._ops.OpOverload.__call__, torch.fx.GraphModule.recompile, torch.fx.proxy.CapturedTraceback

    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError

    for model in (Stack(Sizes).eval(), Fails()):
        try:
            trace(model, ExampleCall((torch.randint(20, (2, 6)),), {}))
        except tracer.CaptureError:
            pass
        now = torch._ops.OpOverload.__call__, torch.fx.GraphModule.recompile, torch.fx.proxy.CapturedTraceback
        assert now == kept


def test_graphs_in_a_graph_get_code_when_they_are_called():
    """What an autocast region computes lies in a graph of its own."""
    model = Stack(Writes).eval()
    ids = torch.randint(20, (2, 6))
    region = trace(model, ExampleCall((ids,), {}))
    inner = [
        each for each in region.root.modules() if isinstance(each, torch.fx.GraphModule) and each is not region.root
    ]
    assert inner
    weights = [model.get_submodule(path).get_parameter(name) for path, name in region.slots.values()]
    with torch.no_grad():
        torch.testing.assert_close(region.root(*weights, ids)[0], model(ids))


def test_other_threads_are_left_alone():
    """A graph that another thread makes while a model is traced has its code at once."""
    found = []

    class Waits(nn.Module):
        def forward(self, x):
            def other():
                found.append(torch.fx.symbolic_trace(nn.ReLU()).code)

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return x.relu()

    trace(Waits(), ExampleCall((torch.randn(2, 3),), {}))
    assert "relu" in found[0]
