"""What a converted model keeps alive: nothing once it is gone, no more with every new size, no hold on its weights."""

import copy
import gc
import pickle
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial

import pytest
import torch
import transformers
from support import small_models, stateful_models
from support.selection import exhaustive
from torch import nn

import kfconvert
import kfconvert.conversion.pipeline

pytestmark = pytest.mark.filterwarnings("ignore")


MAKERS = stateful_models.MAKERS


@cache
def inputs_of(name: str) -> tuple[torch.Tensor, ...]:
    return stateful_models.arguments(MAKERS[name]())


def converted(name: str, **options) -> nn.Module:
    """A new conversion, which is no copy of another."""
    converter = kfconvert.ModelConverter(select="all", validate_accuracy=False, effort="fast")
    model = converter.convert_model(MAKERS[name](), example_inputs=inputs_of(name), **options)
    assert converter.conversion_stats["total_replaced"]
    return model


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


def gone(model_of: Callable[[], nn.Module], use: Callable[[nn.Module], object] | None = None) -> bool:
    """Whether no module and no tensor of a model is left after its last reference is gone."""
    model = model_of()
    if use is not None:
        use(model)
    references = [weakref.ref(each) for each in (*model.modules(), *tensors(model))]
    del model
    return all(reference() is None for reference in references)


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@cache
def prepared(name: str) -> None:
    """What libraries import at their first use may raise, and keep the frames around it."""
    used(converted(name), name)
    gc.collect()


@pytest.mark.parametrize("name", ["blocks", "bert", *exhaustive("attention")])
def test_a_converted_model_that_is_deleted_is_gone(name, no_collector, tmp_path):
    def use(model: nn.Module) -> None:
        used(model, name)
        str(model.kfconvert_info())
        model.kfconvert_refresh()
        kfconvert.save(model, tmp_path / "saved")
        used(pickle.loads(pickle.dumps(model)), name)
        for call in (model, partial(kfconvert.export, model)):  # the original refuses this as well
            with suppress(Exception):
                call(torch.zeros(3, 1, 1, 9))
        handle = next(model.children()).register_forward_hook(lambda *_: None)
        used(model, name)
        handle.remove()
        if name == "bert":
            model.save_pretrained(tmp_path / "pretrained")

    prepared(name)
    assert gone(MAKERS[name], lambda model: used(model, name)), "not even the original is"
    assert gone(lambda: converted(name, inplace=True), use)
    model = converted(name)
    assert gone(lambda: copy.deepcopy(model), use), "a copy is not"


def test_a_result_that_nobody_keeps_is_gone(no_collector):
    model, inputs = MAKERS["cnn"](), inputs_of("cnn")
    before = set(map(id, gc.get_objects()))
    kfconvert.auto_convert_model(model, example_inputs=inputs, select="all")
    left = [each for each in gc.get_objects() if id(each) not in before and isinstance(each, (nn.Module, nn.Parameter))]
    assert not left


def interrupted(stage: str, done: int, total: int) -> None:
    if stage == "time":
        raise KeyboardInterrupt


FAILURES = {
    "inputs": {"example_inputs": torch.zeros(3, 1, 1, 9)},
    "interrupt": {"progress": interrupted, "inplace": True},
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_model_that_could_not_be_converted_is_gone(failure, no_collector):
    options = {"example_inputs": inputs_of("attention")} | FAILURES[failure]

    def fails(model: nn.Module) -> None:
        with pytest.raises((kfconvert.ConversionError, KeyboardInterrupt)) as raised:
            kfconvert.ModelConverter(select="all").convert_model(model, **options)
        # An exception refers to all frames that it came through.
        del raised

    before = set(map(id, gc.get_objects()))
    assert gone(MAKERS["attention"], fails)
    assert not [each for each in gc.get_objects() if id(each) not in before and isinstance(each, nn.Parameter)]


def test_a_model_that_has_generated_is_gone(no_collector, monkeypatch):
    monkeypatch.setattr(
        kfconvert.conversion.pipeline, "can_record", lambda device: True
    )  # as on a GPU, but for the recordings
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 60}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, pad_token_id=0)
    ids = torch.randint(3, 60, (2, 6))

    def made() -> nn.Module:
        converter = kfconvert.ModelConverter(select="all", effort="fast", new_tokens=0, validate_accuracy=False)
        return converter.convert_model(transformers.LlamaForCausalLM(config).eval(), example_inputs=ids)

    def generated(model: nn.Module) -> None:
        for sampled in (False, True):
            model.generate(ids, max_new_tokens=4, do_sample=sampled)

    def served(model: nn.Module) -> None:
        generated(model)
        assert model.kfconvert_info()["generate"]["served"] == 2

    generated(transformers.LlamaForCausalLM(config).eval())
    gc.collect()  # as in ``prepared``
    assert gone(made, served)


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
