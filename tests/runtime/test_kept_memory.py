"""What a converted model keeps alive: nothing once it is gone, no more with every new size, no hold on its weights."""

import copy
import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from support import small_models, stateful_models
from torch import nn

import kfconvert
from kfconvert.runtime import guarded_forward, refusals

pytestmark = pytest.mark.filterwarnings("ignore")
MAKERS = {**stateful_models.MAKERS, "writing": stateful_models.writing}
FEW = ("attention", "blocks", "cnn", "bert")


@cache
def inputs_of(name: str) -> tuple[torch.Tensor, ...]:
    return stateful_models.arguments(MAKERS[name]())


def converted(name: str) -> nn.Module:
    """A conversion of one's own, which is no copy of another."""
    return small_models.convert(MAKERS[name](), example_inputs=inputs_of(name), validate_accuracy=False)


def used(model: nn.Module, name: str) -> None:
    """Calls that the programs serve, that they do not, and with gradients."""
    inputs = inputs_of(name)
    with torch.no_grad():
        model(*inputs)
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]
    outputs.sum().backward()
    model.train()
    model(*inputs)
    model.eval()
    with torch.no_grad():
        model(*(x[:1] for x in inputs))
        model(*inputs)


def gone(model_of: Callable[[], nn.Module], name: str, calls: bool = True) -> bool:
    """Whether nothing of a model is left after its last reference is gone."""
    model = model_of()
    if calls:
        used(model, name)
    references = [weakref.ref(module) for module in model.modules()]
    del model
    return all(reference() is None for reference in references)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("calls", [False, True], ids=["unused", "used"])
def test_a_converted_model_that_is_deleted_is_gone(name, calls, no_collector):
    converted(name)  # what libraries import at their first use may raise, and keep the frames around it
    assert gone(MAKERS[name], name, calls), "not even the original is"
    assert gone(lambda: converted(name), name, calls)


@pytest.mark.parametrize("name", ("attention", "cnn"))
def test_a_deep_copy_that_is_deleted_is_gone(name, no_collector):
    model = converted(name)
    assert gone(lambda: copy.deepcopy(model), name)


@pytest.mark.parametrize("name", ("attention", "cnn"))
def test_a_frozen_model_that_is_deleted_is_gone(name, no_collector):
    def frozen() -> nn.Module:
        model = converted(name)
        with torch.no_grad():
            model(*inputs_of(name))
        forward = guarded_forward(kfconvert.freeze(model))
        forward.frozen.to_host(model, [variant.program for variant in forward.variants], torch.device("cpu"))
        assert model.kfconvert_info()["frozen"]["host_bytes"]
        return model

    known = len(refusals._frozen)
    assert gone(frozen, name, calls=False)
    assert len(refusals._frozen) == known


def test_a_model_that_was_loaded_and_is_deleted_is_gone(tmp_path, no_collector):
    kfconvert.save(converted("attention"), tmp_path / "saved")
    assert gone(lambda: kfconvert.load(tmp_path / "saved", model=MAKERS["attention"]()), "attention")


def test_a_model_that_was_converted_in_place_is_gone(no_collector):
    def made() -> nn.Module:
        return small_models.convert(
            MAKERS["attention"](), example_inputs=inputs_of("attention"), validate_accuracy=False, inplace=True
        )

    assert gone(made, "attention")


def test_the_converter_keeps_no_model(no_collector):
    converter = kfconvert.ModelConverter(validate_accuracy=False, select="all")
    model = converter.convert_model(MAKERS["attention"](), example_inputs=inputs_of("attention"))
    reference = weakref.ref(model)
    del model
    assert reference() is None
    assert converter.explain()


class Small(nn.Module):
    """(batch, 8) -> (batch, 8), of which the batch size is free and 8 is not; other widths are cut."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x[:, :8]))


@pytest.mark.parametrize("free", [True, False], ids=["sizes that programs serve", "sizes that miss"])
def test_what_is_kept_does_not_grow_with_the_number_of_sizes(free):
    model = small_models.convert(Small().eval(), example_inputs=torch.randn(2, 8), validate_accuracy=False)
    count = 2500
    x = torch.randn(1, 1).expand(2 * count + 20, 2 * count + 20)

    def calls(start: int) -> None:
        with torch.no_grad():
            for size in range(start, start + count):
                model(x[:size, :8] if free else x[:2, :size])

    tracemalloc.start()
    try:
        calls(9)  # what is kept of so many may be kept, but no more
        before = tracemalloc.take_snapshot()
        calls(9 + count)
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    own = [tracemalloc.Filter(True, "*/kfconvert/*")]
    grown = sum(s.size_diff for s in after.filter_traces(own).compare_to(before.filter_traces(own), "filename"))
    assert grown < 20_000, f"{grown} bytes for {count} more sizes"
    guard = model.kfconvert_info()["guard"]
    assert guard["hits"] + sum(guard["misses"].values()) == 2 * count, "not every call was counted"
    assert len(guard["misses"]) < 200


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("name", FEW)
def test_no_tensor_of_the_model_has_weak_references(name):
    model = converted(name)
    assert not [weakref.getweakrefcount(tensor) for tensor in tensors(model) if weakref.getweakrefcount(tensor)]
    used(model, name)
    assert not [weakref.getweakrefcount(tensor) for tensor in tensors(model) if weakref.getweakrefcount(tensor)]


@pytest.mark.parametrize("name", FEW)
def test_tensors_may_be_swapped(name, monkeypatch):
    model, original = converted(name), MAKERS[name]()
    used(model, name), used(original, name)
    inputs = inputs_of(name)
    for each in (model, original):
        generator = torch.Generator().manual_seed(0)
        for parameter in each.parameters():
            parameter.grad = None
            new = torch.randn(parameter.shape, generator=generator)
            torch.utils.swap_tensors(parameter, nn.Parameter(new, parameter.requires_grad))
    hits = small_models.guard(model)["hits"]
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs), original(*inputs), rtol=1e-3, atol=1e-3)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    assert torch.__future__.get_swap_module_params_on_conversion()
    for each in (model, original):
        each.half().float()
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs), original(*inputs), rtol=1e-3, atol=1e-3)
    assert small_models.guard(model)["hits"] == hits + (2 if name != "blocks" else 0)
