"""Converted models among other tools: copies, files, dtypes, compilers, trainers, adapters, unusual modules."""

import copy
import inspect
import types

import pytest
import torch
import transformers
from support.selection import exhaustive
from support.small_models import assert_valid, bert, change_weights, cnn, convert, converted, guard, inputs_of
from torch import nn
from torch.nn.utils import prune

from kfconvert.converter import ModelConverter


def logits(model, **inputs):
    outputs = model(**(inputs or inputs_of(model, batch=3, seed=1)))
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def test_a_forward_that_is_bound_once_more(original, fused):
    """As accelerate leaves it after ``unwrap_model(..., keep_fp32_wrapper=False)``."""
    twin = copy.deepcopy(fused)
    twin.forward = types.MethodType(twin.forward, twin)
    assert_valid(original, twin)


# Copies and files


def test_deepcopy_is_converted_and_independent(original, fused):
    twin = copy.deepcopy(fused)
    assert_valid(original, twin)
    assert guard(twin)["hits"] and not guard(twin)["misses"]
    change_weights(twin)
    assert_valid(original, fused)
    change_weights(original)
    assert_valid(original, twin)


@pytest.mark.filterwarnings("ignore:kfconvert.*pickled:RuntimeWarning")
def test_torch_save_of_the_whole_model(original, fused, tmp_path):
    torch.save(fused, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(loaded) is type(original)
    assert_valid(original, loaded)


def test_state_dict_goes_both_ways(make, original, fused):
    change_weights(fused)
    original.load_state_dict(fused.state_dict())
    assert_valid(original, fused)
    other = make()
    fused.load_state_dict(other.state_dict())
    assert_valid(other, fused)


def test_save_pretrained_and_from_pretrained(original, fused, tmp_path):
    if not isinstance(original, transformers.PreTrainedModel):
        with pytest.raises(AttributeError):
            fused.save_pretrained(tmp_path)
        return
    fused.save_pretrained(tmp_path)
    again = type(original).from_pretrained(tmp_path).eval()
    assert list(again.state_dict()) == list(original.state_dict())
    torch.testing.assert_close(logits(again), logits(original), rtol=0, atol=0)


# Compilers and transforms


# Training tools and adapters


def test_the_signature_that_trainers_inspect(original, fused):
    for function in ("forward", "__init__"):
        assert inspect.signature(getattr(fused, function)) == inspect.signature(getattr(original, function))
    assert type(fused) is type(original)
    assert transformers.utils.generic.can_return_loss(type(fused)) == ("return_loss" in inspect.getsource(type(fused)))


def test_trainer_of_transformers(tmp_path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs the package accelerate")
    original, fused = bert(), converted(bert)
    rows = [{"input_ids": torch.arange(3, 10) + i, "labels": i % 3, "note": "no argument"} for i in range(4)]
    options = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=4, learning_rate=0.1, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    predictions = []
    for model in (original, fused):
        trainer = transformers.Trainer(model=model, args=options, train_dataset=rows)
        trainer.train()  # drops the column that forward's signature does not name
        predictions.append(trainer.predict(rows).predictions)
        assert model.config.use_cache is False
    assert not any("use_cache" in reason for reason in fused.kfconvert_info()["guard"]["misses"])
    torch.testing.assert_close(*map(torch.as_tensor, predictions), rtol=1e-3, atol=1e-4)
    assert_valid(original.eval(), fused.eval())


# Modules that are more than they seem


NORMS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "old weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", *exhaustive("old weight_norm", "orthogonal")])
def test_weights_that_are_computed(norm):
    model = cnn()
    NORMS[norm](model.conv2), NORMS[norm](model.head)
    check_changed(model)  # what has no hooks is fused


COMPUTED = {
    "weight_norm": (nn.utils.weight_norm, 'torch.nn.utils.remove_weight_norm(module, "weight")'),
    "pruning": (
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
        'torch.nn.utils.prune.remove(module, "weight")',
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compute, remedy", COMPUTED.values(), ids=COMPUTED)
def test_where_a_weight_is_computed_the_reason_says_how_to_remove_that(compute, remedy):
    module = nn.Linear(8, 8)
    model = nn.Sequential(module, nn.GELU(), nn.Linear(8, 8)).eval()
    compute(module)
    converter = ModelConverter(select="all", effort="fast")
    converter.convert_model(model, input_shape=(2, 8))
    refused = [*converter.conversion_stats["regions"], *converter.conversion_stats["near_misses"]]
    assert any(remedy in (each["reason"] or "") for each in refused)
    exec(remedy, {"torch": torch, "module": module})
    converter.convert_model(model, input_shape=(2, 8))
    assert "linear_gelu" in [site["pattern"] for site in converter.conversion_stats["sites"]]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", [nn.utils.weight_norm, lambda module: prune.l1_unstructured(module, "weight", 0.5)])
def test_a_weight_that_is_computed_from_now_on(change):
    original, x = nn.Linear(6, 6), {"input": torch.randn(3, 6)}
    fused = convert(original, example_inputs=x)
    change(original), change(fused)
    with pytest.warns(RuntimeWarning, match="as by weight_norm or pruning"):
        assert_valid(original, fused, x)


def check_changed(model, x=None):
    """Accurate when converted, and again with other weights."""
    inputs = inputs_of(model) if x is None else {"input": x}
    fused = convert(model.eval(), example_inputs=inputs, effort="fast")
    assert_valid(model, fused, inputs)
    change_weights(model, fused)
    assert_valid(model, fused, inputs)
    return fused


@pytest.mark.filterwarnings("ignore:kfconvert.*has hooks:RuntimeWarning", "ignore:kfconvert fused nothing:UserWarning")
@pytest.mark.parametrize("place", ["", "bn1"])
def test_hooks_are_called_once_and_may_change_values(place):
    seen = []

    def before(module, args, kwargs):
        seen.append("before")
        return tuple(arg * 2 for arg in args), {name: value * 2 for name, value in kwargs.items()}

    def after(module, args, output):
        seen.append("after")
        return output + 1

    model = cnn()
    model.get_submodule(place).register_forward_pre_hook(before, with_kwargs=True)
    model.get_submodule(place).register_forward_hook(after)
    fused = check_changed(model)  # what has no hooks is fused
    seen.clear()
    with torch.no_grad():
        fused(**inputs_of(model))
    assert seen == ["before", "after"]


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5


class Padded(nn.Conv2d):
    """A convolution with padding like TensorFlow's: more at the end than at the start."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (0, 1, 0, 1)))


def test_subclasses_with_their_own_forward():
    model = cnn()
    model.conv2, model.head = Padded(8, 8, 2), Scaled(8, 5)
    check_changed(model)


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, input):
            return torch.relu(self.second(nn.functional.gelu(self.first(input))))

    fused = check_changed(Tied(), torch.randn(3, 6))
    assert fused.second.weight is fused.first.weight
    assert len(list(fused.parameters())) == 3


class Twice(nn.Module):
    """One block called twice, once with a residual."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, input):
        x = torch.relu(self.linear(input))
        return self.norm(input + torch.relu(self.linear(x)))


class Loop(nn.Module):
    """A loop over a ModuleList of branches that all see the input."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3))

    def forward(self, input):
        total = input
        for index, branch in enumerate(self.branches):
            total = total + branch(input) * (index + 1)
        return total


@pytest.mark.parametrize("block", [Twice, Loop])
def test_modules_called_in_python_loops_and_more_than_once(block):
    fused = check_changed(block(), torch.randn(3, 6))
    assert guard(fused)["hits"] and not guard(fused)["misses"]
