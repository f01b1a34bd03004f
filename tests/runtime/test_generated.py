"""Kernels that TorchInductor generates for recorded calls."""

import copy
import dataclasses
import pickle

import pytest
import torch
import transformers as hf
from support.selection import exhaustive
from torch import nn
from torch._inductor import lowering

import kfconvert
from kfconvert import fallbacks
from kfconvert.artifact import load, save
from kfconvert.conversion import effort, generated_kernels, timing
from kfconvert.runtime import Generated, Ungenerated
from kfconvert.runtime.recording import generated
from kfconvert.runtime.recording import program as programs
from kfconvert.runtime.recording.split import Split


class Net(nn.Module):
    """A fused norm between operators that are not fused."""

    def __init__(self):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(32), nn.Linear(32, 32)
        self.register_buffer("scale", torch.full((32,), 0.5))

    def forward(self, x, power=2):
        y = torch.nn.functional.silu(self.norm(x * self.scale + self.scale.exp()).cos())
        return self.proj(y.exp().pow(power).roll(1, -1) + x)


def converted(device="cpu", **options):
    torch.manual_seed(0)
    model = Net().eval().to(device)
    return model, kfconvert.auto_convert_model(model, (4, 32), **options)


@pytest.fixture
def eager(monkeypatch):
    """The graph itself in place of its compiled form; tensors on the CPU count as tensors on a device."""
    graphs = []

    def compiled(module, tensors):
        graphs.append(module)
        return module

    monkeypatch.setattr(generated, "_compile", compiled)
    monkeypatch.setattr(
        generated, "_is_on_device", lambda value: isinstance(value, torch.Tensor) and not value.is_mkldnn
    )
    return graphs


@pytest.fixture
def program():
    _, fused = converted(select="all", include=["layernorm*"])
    (variant,) = fused.forward.variants
    return fused, variant.program, [torch.randn(4, 32)]


@pytest.fixture(params=[programs.LEAST_BYTES, 0], ids=["whole", "split"])
def least(monkeypatch, request):
    monkeypatch.setattr(programs, "LEAST_BYTES", request.param)


class TestGenerated:
    """``Generated`` without a compiler."""

    def test_a_call_reads_the_weights_and_the_plans(self, eager, least, program):
        model, program, leaves = program
        form = Generated(program, leaves)
        call = form.call(program, program.plans(leaves), leaves)
        other = [torch.randn(4, 32)]
        torch.testing.assert_close(call(other), program.run(other))
        with torch.no_grad():
            model.proj.weight.mul_(2)  # the code reads it
        torch.testing.assert_close(call(other), program.run(other))
        model.norm.weight = nn.Parameter(3 * model.norm.weight.detach())  # a changed plan is traced again
        expected = program.run(leaves)
        call = form.call(program, program.plans(leaves), leaves)
        torch.testing.assert_close(call(leaves), expected)

    def test_traces_take_a_small_share_of_the_time(self, eager, monkeypatch, program):
        monkeypatch.setattr(generated, "_SECONDS", -1.0)
        model, program, leaves = program
        form = Generated(program, leaves)
        assert form.call(program, program.plans(leaves), leaves) is not None  # needs no further trace
        model.norm.weight = nn.Parameter(3 * model.norm.weight.detach())
        program.run(leaves)
        assert form.call(program, program.plans(leaves), leaves) is None

    def test_another_code_is_not_served(self, eager, program):
        _, program, leaves = program
        form = Generated(program, leaves)
        _, model = converted(select="all", include=["linear*"])
        other = model.forward.variants[0].program
        other.run(leaves)
        assert form.call(other, other.plans(leaves), leaves) is None

    def test_operators_have_fallbacks_in_older_versions(self, monkeypatch):
        monkeypatch.setattr(torch, "__version__", "2.12.0")
        fallbacks.register_fallbacks()
        assert {
            torch.ops.kfconvert.rms_norm_act.default,
            torch.ops.kfconvert.skinny_linear.default,
        } <= lowering.lowerings.keys()

    def test_an_error_of_the_compiler_is_one_line(self, monkeypatch, program):
        _, program, leaves = program

        def fails(module, tensors):
            raise RuntimeError("no compiler\nwith many lines")

        monkeypatch.setattr(generated, "_compile", fails)
        with pytest.raises(Ungenerated, match=r"^RuntimeError: no compiler$"):
            Generated(program, leaves)

    def test_copies_share_it_and_pickles_drop_it(self, eager, program):
        _, program, leaves = program
        form = Generated(program, leaves)
        copied = copy.deepcopy(form)
        assert copied.call(program, program.plans(leaves), leaves) is not None
        assert pickle.loads(pickle.dumps(form)).call(program, program.plans(leaves), leaves) is None


class Ends(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.norm, self.head, self.end = nn.LayerNorm(8), nn.Linear(8, 6), end

    def forward(self, x):
        return self.end(self.head(self.norm(x)), x)


def words(kind, config):
    return lambda: kind(config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=99))


SPLIT = {
    "with an input": (lambda: Ends(lambda y, x: (x, y)), True),
    "twice": (lambda: Ends(lambda y, x: (y, y)), False),
    "read again": (lambda: Ends(lambda y, x: (y.cos(), y)), False),
    "viewed": (lambda: Ends(lambda y, x: y.flatten()), False),
    "gpt2": (words(hf.GPT2LMHeadModel, hf.GPT2Config), True),
    "llama": (words(hf.LlamaForCausalLM, hf.LlamaConfig), True),
}


@pytest.mark.parametrize("excluded", [[], ["linear"]], ids=["fused", "operator"])
@pytest.mark.parametrize("name", [*(name for name in SPLIT if name != "gpt2"), *exhaustive("gpt2")])
@torch.no_grad()
def test_both_parts_of_a_split_compute_what_the_whole_does(monkeypatch, name, excluded):
    make, is_split = SPLIT[name]
    model = make().eval()
    x = torch.randn(4, 8) if isinstance(model, Ends) else torch.arange(24).view(2, 12)
    fused = kfconvert.auto_convert_model(model, example_inputs=x, select="all", exclude=excluded)
    program = fused.forward.variants[0].program
    expected = program.run([x])
    assert not isinstance(program.call(program.plans([x]), expected), Split)  # the output is small
    monkeypatch.setattr(programs, "LEAST_BYTES", 0)
    call = program.call(program.plans([x]), expected)
    assert isinstance(call, Split) is is_split and all(map(torch.equal, call([x]), expected))


@pytest.fixture
def generating(monkeypatch):
    """Conversions keep generated kernels, whatever their time and that of the model."""
    monkeypatch.setattr(timing.Timings, "slower", lambda timings: None)
    monkeypatch.setitem(effort.EFFORTS, "full", dataclasses.replace(effort.EFFORTS["full"], generates_kernels=True))
    monkeypatch.setattr(generated_kernels, "LEAST_GAIN", 0.0)


def _replayed(model, *args):
    with torch.no_grad():
        for _ in range(4):
            found = model(*args)
    return found


@pytest.mark.cuda
@pytest.mark.parametrize("kernels", ["all", "rest"])
def test_recorded_calls_have_generated_kernels(generating, least, monkeypatch, tmp_path, kernels):
    generate, device = generated_kernels._generated, "cuda"
    monkeypatch.setattr(
        generated_kernels,
        "_generated",
        lambda program, captured, leaves, name: generate(program, captured, leaves, name) if name == kernels else None,
    )
    original, fused = converted(device)
    assert [form["kernels"] for form in fused.kfconvert_info()["generated"]] == [kernels]

    def check(model, reference, *args):
        with torch.no_grad():
            torch.testing.assert_close(_replayed(model, *args), reference(*args), rtol=1e-5, atol=1e-5)

    def count(model):
        return model.kfconvert_info()["cuda_graphs"]["generated"]

    x = torch.randn(4, 32, device=device)
    check(fused, original, x)
    check(fused, original, torch.randn(7, 32, device=device))  # another size has no generated kernels
    check(fused, original, x, 3)
    assert count(fused) == 1
    twin = copy.deepcopy(fused)
    with torch.no_grad():
        for model in (fused, original):
            model.norm.weight.mul_(3), model.scale.fill_(0.25)
    check(fused, original, x)
    state = {name: torch.randn_like(tensor) for name, tensor in original.state_dict().items()}
    fused.load_state_dict(state), original.load_state_dict(state), twin.load_state_dict(state)
    check(fused, original, x)
    check(twin, original, x)
    check(pickle.loads(pickle.dumps(fused)), original, x)
    save(fused, tmp_path / "saved")
    loaded = load(tmp_path / "saved", model=Net().to(device), device=device)
    check(loaded, original, x)
    assert count(loaded) == 1
