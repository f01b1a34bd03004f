"""The backend of torch.compile, and models converted with ``training=True``: gradients are the original's."""

import copy
import pickle

import pytest
import torch
import transformers
from support.devices import DEVICES
from support.selection import exhaustive
from support.small_models import assert_valid, guard
from torch import nn
from torch._inductor import compile_fx
from torch.nn import functional as F

from kfconvert import ArtifactError, auto_convert_model, export, freeze, load, save
from kfconvert.training import head_loss
from kfconvert.training.backend import compile_graph

CLASSES = 37


def flat(x, y, **options):
    return F.cross_entropy(x.view(-1, CLASSES), y.view(-1), **options)


def padded(x, y):
    y = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    y[y == 5] = -100
    return F.cross_entropy(x.flatten(0, 1).float(), y.flatten(), reduction="sum") / 11


FUSED = {
    "flat": flat,
    "padded": padded,
    "shifted": lambda x, y: F.cross_entropy(x.float()[..., :-1, :].reshape(-1, CLASSES), y[..., 1:].reshape(-1)),
    "smooth": lambda x, y: 1e3 * flat(x, y.clamp_min(0), label_smoothing=0.1, ignore_index=0),
}
KEPT = {
    "logits are returned": lambda x, y: (flat(x, y), x),
    "logits are written": lambda x, y: flat(x.mul_(2), y),
    "fewer classes": lambda x, y: F.cross_entropy(x[..., :30].reshape(-1, 30), y.view(-1) % 30),
    "rows of a reshape": lambda x, y: F.cross_entropy(x.view(-1, CLASSES)[::2, :], y.view(-1)[::2]),
    "class weights": lambda x, y: flat(x, y, weight=y.new_ones(CLASSES, dtype=x.dtype)),
    "each loss": lambda x, y: flat(x, y, reduction="none").square().sum(),
    "classes last": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "no gradient": lambda x, y: flat(x.detach(), y) + x.sum(),
}


def results(loss, dtype=torch.float32, device="cpu", frozen=None):
    """Loss and gradients of a tied head: compiled, uncompiled, and uncompiled in float64."""
    torch.manual_seed(0)
    tensors = [torch.randn(size).to(device, dtype) for size in ((CLASSES, 16), (16, 16), CLASSES)]
    ids, found = torch.randint(CLASSES, (8, 50), device=device), []

    def step(table, middle, bias):
        x = (F.embedding(ids, table) @ middle).tanh()
        return loss(F.linear(x, table, bias if frozen != "bias" else None), torch.where(ids % 3 == 0, -100, ids))

    for call, kind in ((torch.compile(step, backend=compile_graph), dtype), (step, dtype), (step, torch.float64)):
        leaves = [tensor.to(kind, copy=True).requires_grad_(index != frozen) for index, tensor in enumerate(tensors)]
        value = call(*leaves)
        value = value[0] if isinstance(value, tuple) else value
        value.backward()
        found.append([value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    return found


def assert_as_accurate(found, own, exact, dtype):
    """In the loss, and in all gradients together; full types: of the largest gradient."""
    assert [value.dtype for value in found] == [value.dtype for value in own]
    goal, order = torch.cat([value.flatten() for value in exact[1:]]), 2 if dtype.itemsize == 2 else torch.inf

    def errors(loss, *gradients):
        distance = torch.cat([value.flatten() for value in gradients]) - goal
        return torch.stack([(loss / exact[0] - 1).abs(), distance.norm(order) / goal.norm(order)])

    least = goal.new_tensor([torch.finfo(dtype).eps, 0] if dtype.itemsize == 2 else [1e-6, 1e-6])
    assert (errors(*found) <= (1.1 * errors(*own)).maximum(least)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", FUSED)
def test_heads_without_logits(loss, dtype, device, heads):
    assert_as_accurate(*results(FUSED[loss], dtype, device), dtype)
    assert heads == [1]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [0, 1, 2, "bias"])
def test_frozen_tensors_and_autocast(frozen, autocast, heads):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_as_accurate(*results(flat, frozen=frozen), torch.bfloat16 if autocast else torch.float32)
    assert heads == [1]


@pytest.mark.parametrize("label", [CLASSES, -1])
def test_labels_outside_the_classes(label, heads):
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        results(lambda x, y: flat(x, torch.full_like(y, label)))
    assert heads == [1]


def test_all_labels_are_ignored(heads):
    found, own, _ = results(lambda x, y: flat(x, torch.full_like(y, -100)))
    assert heads == [1] and found[0].isnan()
    torch.testing.assert_close(found, own, equal_nan=True)


@pytest.mark.parametrize("loss", KEPT)
def test_other_uses_of_logits_stay(loss, heads):
    found, own, _ = results(KEPT[loss])
    assert set(heads) == {0}
    torch.testing.assert_close(found, own)


def test_small_logits_stay(heads, monkeypatch):
    monkeypatch.setattr(head_loss, "SMALLEST_LOGITS", 400 * CLASSES * 4 + 1)
    results(flat)
    results(flat, torch.float64)
    assert heads == [0, 1]


@pytest.mark.parametrize(("pixels", "freely"), [(1, False), (2, True)])
def test_inputs_of_convolutions_on_one_pixel_are_saved(pixels, freely, monkeypatch):
    """With them, TorchInductor must not compute more values again than usual."""
    first, second = (nn.Conv2d(channels, 4, 3, padding=1) for channels in (3, 4))
    head, found = nn.Linear(4 * pixels**2, CLASSES), []

    def run_uncompiled(module, inputs):
        found.append(not torch._functorch.config.ban_recompute_materialized_backward)
        return module.forward

    def step(x, y):
        return F.cross_entropy(head(second(first(x).relu()).flatten(1)), y)

    torch._dynamo.reset()
    monkeypatch.setattr(head_loss, "SMALLEST_LOGITS", 0)
    monkeypatch.setattr(compile_fx, "compile_fx", run_uncompiled)
    torch.compile(step, backend=compile_graph)(torch.randn(2, 3, pixels, pixels), torch.arange(2))
    assert found == [freely]


def test_torch_inductor(monkeypatch):
    """The backend as it is."""
    monkeypatch.setattr(head_loss, "SMALLEST_LOGITS", 0)
    torch._dynamo.reset()
    assert_as_accurate(*results(flat), torch.float32)
    assert torch._dynamo.lookup_backend("kfconvert") is compile_graph


SIZES = {"vocab_size": 50, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
LLAMA = {**SIZES, "use_cache": False, "max_position_embeddings": 16, "tie_word_embeddings": True}
GPT2 = {"vocab_size": 50, "n_layer": 2, "n_embd": 16, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
MODELS = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
}
IDS = torch.arange(3, 24).reshape(3, 7)
LABELLED = {"input_ids": IDS, "labels": torch.where(IDS % 3 == 0, -100, IDS)}
X = {"input": torch.randn(4, 8)}


class Broken(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, input):
        x = self[1](self[0](input)).relu()
        torch._dynamo.graph_break()
        return self[2](x)


def converted(model, inputs=X):
    torch.manual_seed(0)
    model = model().eval()
    return model, auto_convert_model(model, example_inputs=inputs, select="all", effort="fast", training=True)


def backward(model, inputs=X, **options):
    torch.manual_seed(1)
    outputs = model(**inputs)
    (outputs.loss if isinstance(outputs, dict) else outputs.square().mean()).backward(**options)
    return outputs


def assert_same_gradients(original, fused):
    pairs = [(one.grad, other.grad) for one, other in zip(original.parameters(), fused.parameters(), strict=True)]
    top = max(one.abs().max() for one, _ in pairs if one is not None)
    for one, other in pairs:
        assert (other is None) if one is None else (one - other).abs().max() <= 1e-6 * top


@pytest.mark.parametrize("name", ["llama", *exhaustive("bert", "gpt2")])
def test_language_models(name, heads):
    """With dropout, a frozen parameter, gradients of several batches, and steps between evaluations."""
    models = original, fused = converted(MODELS[name], LABELLED)
    for sizes in ((3, 2, 3, 3), (2,)):
        for model in models:
            list(model.train().parameters())[3].requires_grad_(False)
            for rows in sizes:
                outputs = backward(model, {key: value[:rows] for key, value in LABELLED.items()})
        assert_same_gradients(original, fused)
        assert "logits" not in outputs
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        with torch.no_grad():
            found, expected = (model.eval()(**LABELLED) for model in models)
        torch.testing.assert_close(found.logits, expected.logits)
    assert heads == [1, 1] and guard(fused) == {"hits": 7, "misses": {}}


def saved(model, folder):
    save(model, folder / "model")
    return load(folder / "model", model=type(model))


CHANGES = {
    "copied": lambda m, _: copy.deepcopy(m),
    "pickled": lambda m, _: pickle.loads(pickle.dumps(m)),
    "saved": saved,
}


@pytest.mark.parametrize("change", CHANGES)
def test_copies_graph_breaks_hooks_and_retained_graphs(change, heads, tmp_path):
    original, fused = converted(Broken)
    fused, calls = CHANGES[change](fused, tmp_path).train(), []
    for hooked in (False, True):
        for model in (original.train(), fused):
            if hooked:
                model[2].register_forward_hook(lambda module, args, output: calls.append(module))
                model[0].weight.register_hook(lambda grad: grad * 2)
            backward(model)
            backward(model, retain_graph=True)
        assert_same_gradients(original, fused)
    assert len(calls) == 4 and len(heads) == 4 and guard(fused) == {"hits": 4, "misses": {}}


@pytest.mark.filterwarnings("ignore:kfconvert fused nothing")
def test_what_cannot_be_compiled_runs_as_it_is(heads, monkeypatch):
    original, fused = converted(Broken)
    # Only the graph after the break fails: the batch norm before it must not run twice.
    compiled = lambda module, inputs: module.no_such_method() if len(inputs) == 3 else module.forward  # noqa: E731
    monkeypatch.setattr(compile_fx, "compile_fx", compiled)
    with pytest.warns(RuntimeWarning, match="original forward for this call: torch.compile failed: AttributeError"):
        for model in (original.train(), fused.train()):
            backward(model)
            backward(model)
    assert_same_gradients(original, fused)
    torch.testing.assert_close(dict(original.named_buffers()), dict(fused.named_buffers()))
    assert list(guard(fused)["misses"].values()) == [2]


class Branch(Broken):
    """Its parts have programs, the model as a whole has none."""

    def forward(self, input):
        x = self[0](input)
        return x if x.sum().item() > 1e6 else self[2](self[1](x))


class Scaled(nn.Module):
    """Nothing in it can be fused."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, input):
        return input * self.weight


@pytest.mark.filterwarnings("ignore:kfconvert fused nothing")
@pytest.mark.filterwarnings("error:kfconvert. .* runs its original forward")
@pytest.mark.parametrize(
    ("kind", "change"), [(Branch, "saved"), (Scaled, None), *((Scaled, change) for change in CHANGES)]
)
def test_models_without_a_program_train_compiled(kind, change, heads, tmp_path):
    original, fused = converted(kind)
    if change is not None:
        fused = CHANGES[change](fused, tmp_path)
    for model in (original.train(), fused.train()):
        backward(model)
    assert_same_gradients(original, fused)
    assert heads and guard(fused) == {"hits": 1, "misses": {}}
    assert_valid(original.eval(), freeze(fused.eval()), X)
    with pytest.raises(ArtifactError, match="nothing is fused in the model as a whole"):
        export(fused, X)


@pytest.mark.filterwarnings("ignore:kfconvert fused nothing")
def test_calls_that_dynamo_does_not_compile_are_misses(heads):
    _, fused = converted(Scaled)
    with torch._dynamo.config.patch(recompile_limit=1), pytest.warns(RuntimeWarning, match="ran it uncompiled"):
        for dtype in (torch.float32, torch.float64):
            backward(fused.train(), {"input": X["input"].to(dtype)})
    assert guard(fused)["hits"] == 1 and list(guard(fused)["misses"].values()) == [1]


@pytest.mark.exhaustive
def test_trained_models_are_converted_again(heads):
    original, fused = converted(Broken)
    for _ in range(2):
        for model in (original.train(), fused.train()):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
        assert guard(fused)["hits"] >= 3 and not guard(fused)["misses"]
        assert_valid(original.eval(), fused.eval(), X)
        fused = auto_convert_model(fused, example_inputs=X, select="all", effort="fast", training=True)
        assert_valid(original, fused, X)
