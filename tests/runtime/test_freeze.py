"""Frozen models: what their calls still check, which changes are errors and when, and what copies of them are."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from support import small_models
from torch import nn

from kfconvert import FrozenError, freeze
from kfconvert.runtime import Derived
from kfconvert.runtime.dispatch.freezing import CHECK_EVERY
from kfconvert.runtime.state.model_state import ModelState


def value(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]


@pytest.fixture
def inputs(original):
    return small_models.inputs_of(original, batch=3, seed=1)


@pytest.fixture
def frozen(fused):
    return freeze(fused)


@pytest.fixture
def cnn():
    return freeze(small_models.converted(small_models.cnn))


def call(model, inputs):
    with torch.no_grad():
        return value(model(**inputs))


def assert_alike(original, model, inputs):
    torch.testing.assert_close(call(model, inputs), call(original, inputs), rtol=1e-3, atol=1e-3)


def test_it_is_the_same_model_with_the_same_outputs(original, fused, inputs):
    kind, state = type(fused), dict(fused.state_dict())
    before = call(fused, inputs)
    assert freeze(fused) is fused and freeze(fused) is fused
    for _ in range(2 * CHECK_EVERY + 2):
        assert torch.equal(call(fused, inputs), before)
    assert small_models.guard(fused) == {"hits": 2 * CHECK_EVERY + 3, "misses": {}}
    assert type(fused) is kind
    assert all(
        fused.state_dict()[key] is not None and torch.equal(fused.state_dict()[key], state[key]) for key in state
    )
    assert list(fused.state_dict()) == list(state) == list(original.state_dict())


def test_most_calls_look_neither_at_the_state_of_the_model_nor_at_its_weights(frozen, inputs):
    call(frozen, inputs)
    with (
        mock.patch.object(ModelState, "change", side_effect=AssertionError),
        mock.patch.object(Derived, "values", side_effect=AssertionError),
    ):
        call(frozen, inputs)


AT_THE_NEXT_CALL = {
    "train": lambda m: m.train(),
    "load_state_dict": lambda m: m.load_state_dict(m.state_dict()),
    "its first parameter": lambda m: m.conv1.weight.detach().zero_(),
    "the place of its first parameter": lambda m: m.conv1._parameters.update(weight=nn.Parameter(torch.zeros(1))),
}
WITHIN_SOME_CALLS = {
    "a submodule": lambda m: setattr(m, "head", nn.Linear(8, 5)),
    "another parameter": lambda m: m.head.weight.detach().zero_(),
    "the memory of a parameter": lambda m: setattr(m.head.weight, "data", torch.zeros(5, 8)),
    "a buffer": lambda m: m.bn1.running_mean.add_(1),
    "a hook on a submodule": lambda m: m.conv2.register_forward_hook(lambda *_: None),
    "an attribute": lambda m: setattr(m.bn1, "eps", 3.0),
}


@pytest.mark.parametrize("name", AT_THE_NEXT_CALL)
def test_a_change_is_an_error_at_the_next_call(cnn, name):
    inputs = small_models.inputs_of(cnn)
    call(cnn, inputs)
    AT_THE_NEXT_CALL[name](cnn)
    for _ in range(2):
        with pytest.raises(FrozenError, match="CNN was frozen"):
            call(cnn, inputs)


@pytest.mark.parametrize("name", WITHIN_SOME_CALLS)
def test_a_change_is_an_error_within_some_calls(cnn, name):
    inputs = small_models.inputs_of(cnn)
    call(cnn, inputs)
    WITHIN_SOME_CALLS[name](cnn)
    with pytest.raises(FrozenError, match="CNN was frozen"):
        for _ in range(CHECK_EVERY):
            call(cnn, inputs)
    with pytest.raises(FrozenError, match="CNN was frozen"):
        call(cnn, inputs)


def test_a_refresh_is_an_error(cnn):
    with pytest.raises(FrozenError, match="CNN was frozen"):
        cnn.kfconvert_refresh()


def test_a_step_of_an_optimizer_is_an_error(cnn):
    inputs = small_models.inputs_of(cnn)
    optimizer = torch.optim.SGD(cnn.parameters(), 0.1)
    cnn(**inputs).sum().backward()
    optimizer.step()
    with pytest.raises(FrozenError, match="its first parameter was written"):
        call(cnn, inputs)


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_what_depends_on_the_call_and_the_process_is_still_asked(cnn):
    original, inputs = small_models.cnn(), small_models.inputs_of(cnn)
    torch.testing.assert_close(cnn(x=inputs["x"][:, :, :9]), original(x=inputs["x"][:, :, :9]))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(call(cnn, inputs), call(original, inputs))
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    call(cnn, inputs)
    hook.remove()
    torch.testing.assert_close(
        torch.func.vmap(cnn)(inputs["x"][None]), torch.func.vmap(original)(inputs["x"][None]), rtol=1e-3, atol=1e-3
    )
    guard = small_models.guard(cnn)
    assert guard["hits"] == 0 and sum(guard["misses"].values()) == 3
    assert {
        "autocast is bfloat16; at conversion it was off",
        "global module hooks are registered, which a fused program would not call",
    } <= set(guard["misses"])
    assert_alike(original, cnn, inputs)
    assert small_models.guard(cnn)["hits"] == 1


def test_gradients_are_those_of_the_original(cnn):
    original, inputs = small_models.cnn(), small_models.inputs_of(cnn)
    for model in (cnn, original):
        model(**inputs).sum().backward()
    for ours, theirs in zip(cnn.parameters(), original.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    assert small_models.guard(cnn) == {"hits": 1, "misses": {}}


def test_a_deep_copy_may_change(original, frozen, inputs):
    call(frozen, inputs)
    duplicate = copy.deepcopy(frozen)
    assert duplicate.kfconvert_info()["frozen"] is False
    small_models.change_weights(duplicate, original)
    assert_alike(original, duplicate, inputs)
    duplicate.load_state_dict(original.state_dict())
    duplicate.train().eval()
    assert_alike(original, duplicate, inputs)
    assert duplicate.kfconvert_info()["guard"]["hits"] == 3
    duplicate.double(), original.double()
    torch.testing.assert_close(next(duplicate.parameters()), next(original.parameters()))


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_a_pickled_one_is_the_original_and_may_change(cnn):
    inputs = small_models.inputs_of(cnn)
    again = pickle.loads(pickle.dumps(cnn))
    assert_alike(small_models.cnn(), again, inputs)
    again.load_state_dict(cnn.state_dict())
    assert again.half().conv1.weight.dtype is torch.float16
    with pytest.raises(FrozenError, match="CNN cannot be frozen: it was pickled"):
        freeze(pickle.loads(pickle.dumps(cnn)))


def test_a_model_that_has_changed_already_cannot_be_frozen():
    model = small_models.converted(small_models.cnn)
    with pytest.raises(FrozenError, match="CNN cannot be frozen: .* is in train mode"):
        freeze(model.train())
    model.eval()
    model.conv2.register_forward_hook(lambda *_: None)
    with pytest.raises(FrozenError, match="conv2 has hooks"):
        freeze(model)


def test_only_converted_models_can_be_frozen():
    with pytest.raises(ValueError, match="freeze takes a converted model, not CNN"):
        freeze(small_models.cnn())
