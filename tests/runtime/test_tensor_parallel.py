"""Models whose layers are divided among ranks: tensor-parallel ones of transformers, and others that call collectives.

Here this process is one rank of two that there are not: a collective of its group takes no other rank's share. What two
ranks compute together is shown by the test of examples/tensor_parallel.py.
"""

import pytest
import torch
import torch.distributed as dist
import transformers
from support.small_models import guard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import kfconvert
from kfconvert import ModelConverter
from kfconvert.process import alone, noted_collectives, shard_of
from kfconvert.process.collectives import CannotBeAlone
from kfconvert.runtime import guarded_forward

X = torch.randn(4, 8)


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Net(nn.Module):
    """(rows, 8) -> (rows, 4)"""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))))


STYLES = {
    "gate": "colwise",
    "up": "colwise",
    "down": "rowwise",
    "norm": "replicated_with_grad_allreduce",  # by a backward hook
    "head": "colwise_gather_output",
}


@pytest.fixture
def made(group):
    """Makes networks of the same weights, each with the shards of this rank, as transformers divides them."""
    mesh = init_device_mesh("cpu", (2,))

    def one():
        torch.manual_seed(0)
        model = Net().eval()
        for name, style in STYLES.items():
            module = model.get_submodule(name)
            for parameter in list(module._parameters):
                ALL_PARALLEL_STYLES[style].shard_param(module, parameter, mesh)
            ALL_PARALLEL_STYLES[style].install_forward(module, mesh)
        return model

    return one


def outputs(model):
    with torch.no_grad():
        return model(X)


def converted(model):
    return ModelConverter(select="all", effort="fast").convert_model(model, example_inputs=X)


def assert_same(fused, original):
    torch.testing.assert_close(outputs(fused), outputs(original), rtol=1e-4, atol=1e-5)
    assert guard(fused)["hits"] and not guard(fused)["misses"]


def test_it_is_one_program_of_shards_and_collectives(made):
    original = made()
    converter = ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(original, example_inputs=X)
    statistics = converter.conversion_stats
    assert [site["pattern"] for site in statistics["sites"] if site["status"] == "applied"] == [
        "gated_linear_silu",
        "linear",
        "add_layernorm",
        "linear",
    ]
    assert statistics["accuracy"]["passed"]
    assert statistics["accuracy"]["reference"].startswith("float64 run of the original")
    assert all(isinstance(model.up.weight, DTensor) for model in (original, fused))
    assert_same(fused, original)
    (variant,) = guarded_forward(fused).variants
    assert variant.region.communicates and not variant.is_recorded


@pytest.mark.heavy
def test_a_language_model_is_one_program_of_shards_and_collectives(tmp_path, request):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    ids = {"input_ids": torch.randint(0, 64, (2, 6))}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    request.getfixturevalue("group")  # of ranks the first one alone would have saved it
    divided = transformers.distributed.DistributedConfig(tp_size=2, tp_plan="auto")
    original = transformers.LlamaForCausalLM.from_pretrained(tmp_path, distributed_config=divided).eval()
    converter = ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(original, example_inputs=ids)

    statistics = converter.conversion_stats
    assert statistics["regions"][0]["captured"] and statistics["accuracy"]["passed"]
    assert statistics["accuracy"]["reference"].startswith("float64 run of the original")
    applied = {site["pattern"] for site in statistics["sites"] if site["status"] == "applied"}
    assert {"add_rms_norm", "gated_linear_silu", "merged_linear", "rotary"} <= applied
    with torch.no_grad():
        torch.testing.assert_close(fused(**ids).logits, original(**ids).logits, rtol=1e-4, atol=1e-5)
    assert guard(fused) == {"hits": 1, "misses": {}}


def write(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def fused_step(model):
    """Which moves no version counter."""
    parameters = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    torch.optim.AdamW(parameters, lr=0.5, fused=True).step()
    model.zero_grad()


def exchange(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


@pytest.mark.parametrize("change", [write, fused_step, exchange])
def test_later_weights_are_those_of_its_program(made, change):
    original = made()
    fused = converted(original)
    before = outputs(fused)
    for model in (original, fused):
        change(model)
    assert_same(fused, original)
    assert not torch.allclose(outputs(fused), before)


def test_a_frozen_one_notices_a_write(made):
    fused = converted(made())
    kfconvert.freeze(fused)
    outputs(fused)
    with torch.no_grad():
        fused.down.weight.mul_(2)
    with pytest.raises(kfconvert.FrozenError):
        for _ in range(200):
            outputs(fused)


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_with_gradients_the_original_runs(made):
    original = made()
    fused = converted(original)
    for model in (original, fused):
        model(X).sum().backward()
    assert not guard(fused)["hits"] and "the call requires gradients" in next(iter(guard(fused)["misses"]))
    for ours, theirs in zip(fused.parameters(), original.parameters()):
        gradients = [each.grad if shard_of(each.grad) is None else shard_of(each.grad) for each in (ours, theirs)]
        torch.testing.assert_close(*gradients)


class Divided(nn.Module):
    """The first half of a layer's columns, whose product is that of all ranks. (rows, 8) -> (rows, 8)"""

    def __init__(self, ask=lambda x: x):
        super().__init__()
        self.up, self.down, self.ask = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), ask

    def forward(self, x):
        x = self.down(nn.functional.gelu(self.up(x)))
        dist.all_reduce(x)
        return torch.relu(self.ask(x))


def asks_without_a_trace(x):
    """Where it is traced nothing shows of the collective, which is called at once."""
    if type(x) is torch.Tensor and not hasattr(x, "fake_mode"):
        dist.all_reduce(torch.ones(1))
    return x


def test_a_forward_that_hides_a_collective_from_the_trace_runs_as_it_is(group):
    converter = ModelConverter(select="all")
    converter.convert_model(Divided(asks_without_a_trace).eval(), example_inputs=X)
    assert converter.conversion_stats["regions"][0]["reason"].startswith("its graph and its forward run different")


def test_what_is_for_one_other_rank_cannot_be_done_alone(group):
    with alone(nn.Linear(2, 2)), pytest.raises(CannotBeAlone, match="c10d::send involves only some of the ranks"):
        dist.send(torch.ones(2), 0)


def test_collectives_of_plain_parameters_are_in_the_program(group):
    original = Divided().eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        original, example_inputs=X
    )
    with torch.no_grad():
        torch.testing.assert_close(fused(X), original(X))
        torch.testing.assert_close(fused(X[:1]), original(X[:1]))
    assert guard(fused) == {"hits": 2, "misses": {}}


def asks_once_more(x):
    dist.all_reduce(x.sum())
    return x


def test_a_collective_whose_result_nobody_wants_is_begun_all_the_same(group):
    """Others wait for it."""
    original = Divided(asks_once_more).eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        original, example_inputs=X
    )
    noted = []
    for model in (original, fused):
        with torch.no_grad(), alone(model), noted_collectives() as begun:
            model(X)
        noted.append(begun)
    assert noted[0] == noted[1] and len(noted[0]) == 2
