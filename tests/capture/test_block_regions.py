"""Blocks whose regions come from the trace of the model around them: the same as from a trace of their own."""

from collections import Counter

import pytest
import torch
import transformers
from torch import Tensor, nn

from kfconvert import ModelConverter
from kfconvert.capture.blocks.regions import region_of_block
from kfconvert.capture.blocks.replay import Repetition
from kfconvert.capture.tracer import free_dimensions, trace
from kfconvert.inputs.example import ExampleCall
from kfconvert.region.region import Region


def bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 20}
    config = transformers.BertConfig(num_hidden_layers=3, vocab_size=50, **sizes)
    return transformers.BertModel(config).eval()


class Blocks(nn.Module):
    """Blocks of one structure, one after the other."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Twice(nn.Module):
    """Hands one tensor to its inner module as two arguments."""

    def __init__(self):
        super().__init__()
        self.inner = Sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) + y


class Writing(nn.Module):
    """Writes into its argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(0.5))


class Rows(nn.Module):
    """Computes with sizes that the model around it may have computed before."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(x.shape[0] * x.shape[1], 6)
        return torch.relu(self.linear(rows)).view(x.shape[0], x.shape[1], 6) + self.shift


def traced(model: nn.Module, call: ExampleCall, dimensions=None) -> Repetition:
    repetition = Repetition(model)
    trace(model, call, free_dimensions(model, call) if dimensions is None else dimensions, repetition)
    return repetition


def derived(repetition: Repetition, block: nn.Module, call: ExampleCall, places=None) -> Region | None:
    return region_of_block(block, call, {"batch": [(0, 0)]} if places is None else places, repetition.recordings)


def test_the_regions_of_berts_blocks_are_those_of_their_own_traces():
    model, places = Blocks(*bert().encoder.layer), {"batch": [(0, 0)], "sequence": [(0, 1)]}
    repetition = traced(model, ExampleCall((torch.randn(2, 9, 32),)), places)
    layer = model.blocks[0]
    for block, call in (
        (layer.intermediate, ExampleCall((torch.randn(2, 7, 32),))),
        (layer.attention.output, ExampleCall((torch.randn(2, 7, 32), torch.randn(2, 7, 32)))),
        (layer.output, ExampleCall((torch.randn(2, 7, 64), torch.randn(2, 7, 32)))),
    ):
        both = {
            name: [(index, dimension) for index in range(len(call.args)) for _, dimension in found]
            for name, found in places.items()
        }
        own, ours = trace(block, call, both), derived(repetition, block, call, both)
        targets = [Counter(str(node.target) for node in r.graph.nodes if node.op != "placeholder") for r in (own, ours)]
        assert targets[0] == targets[1]
        assert ours.inputs == own.inputs and set(ours.slots.values()) == set(own.slots.values())
        assert ours.guard.free == own.guard.free and ours.reads == own.reads and ours.out_spec == own.out_spec
        assert ours.guard.refusal([torch.randn(3, 30, leaf.shape[-1]) for leaf in call.args]) is None


def test_limits_of_the_model_around_a_block_are_not_its_own():
    model = bert()
    ids = torch.randint(1, 50, (2, 9))
    repetition = traced(model, ExampleCall((), {"input_ids": ids}))  # no more than max_position_embeddings of them
    block, call = model.encoder.layer[0].intermediate, ExampleCall((torch.randn(2, 7, 32),))
    assert any(known.module is block for known in repetition.recordings)
    assert derived(repetition, block, call, {"batch": [(0, 0)], "sequence": [(0, 1)]}) is None


def test_sizes_that_were_computed_before_are_read_from_the_arguments():
    model, call = Blocks(Rows(), Rows(), Rows()), ExampleCall((torch.randn(2, 3, 6),))
    region = derived(traced(model, call), model.blocks[0], call)
    graph = torch.fx.GraphModule(region.root, region.graph)
    for batch in (2, 5):
        x = torch.randn(batch, 3, 6)
        state = [model.blocks[0].get_submodule(path)._parameters.get(name) for path, name in region.slots.values()]
        state = [model.blocks[0].shift if tensor is None else tensor for tensor in state]
        torch.testing.assert_close(graph(*state, x)[0], model.blocks[0](x))


@pytest.mark.parametrize("call", [
    ExampleCall((torch.randn(2, 3, 6),), {"unknown": 1}),
    ExampleCall((torch.randn(2, 3, 6).double(),)),
    ExampleCall((torch.randn(2, 18),)),
    ExampleCall((torch.randn(2, 4, 6),)),
], ids=["arguments", "dtype", "rank", "size"])  # fmt: skip
def test_a_call_of_another_kind_has_no_region(call):
    model = Blocks(Rows(), Rows())
    repetition = traced(model, ExampleCall((torch.randn(2, 3, 6),)))
    assert derived(repetition, model.blocks[0], ExampleCall((torch.randn(2, 3, 6),))) is not None
    assert derived(repetition, model.blocks[0], call) is None


def test_one_tensor_as_two_arguments_has_no_region():
    model, x = Blocks(Twice(), Twice()), torch.randn(2, 3, 6)
    repetition = traced(model, ExampleCall((x,)))
    assert any(known.module is model.blocks[0].inner for known in repetition.recordings)
    call = ExampleCall((x, torch.randn(2, 3, 6)))
    assert derived(repetition, model.blocks[0].inner, call, {"batch": [(0, 0), (1, 0)]}) is None


def test_a_block_that_writes_into_its_argument_has_no_region():
    model, x = Blocks(Writing(), Writing()), torch.randn(2, 3, 6)
    assert derived(traced(model, ExampleCall((x.clone() + 0,))), model.blocks[1], ExampleCall((x,))) is None


def test_each_block_watches_the_settings_that_it_read_itself():
    converted = ModelConverter(select="all").convert_model(bert(), input_shape=(2, 9))
    ids = torch.randint(1, 50, (2, 9))
    with torch.no_grad():
        expected = converted(ids).last_hidden_state
        converted.config.output_hidden_states = True
        with pytest.warns(RuntimeWarning, match="output_hidden_states"):
            result = converted(ids)
    torch.testing.assert_close(result.last_hidden_state, expected)
    parts = converted.kfconvert_info()["parts"].values()
    assert sum(counts["hits"] for counts in parts) >= 3
    assert not any(counts["misses"] for counts in parts)
