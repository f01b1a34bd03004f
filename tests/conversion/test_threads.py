"""Conversions in several threads, beside threads that call models: nothing of the process is changed for anybody."""

import builtins
import contextlib
import copy
import io
import logging
import math
import sys
import threading
import warnings

import pytest
import torch
import transformers.models.bert.modeling_bert  # which sets filters of its own where it is first used
from torch import nn
from torch._guards import detect_fake_mode
from torch.utils import _python_dispatch
from transformers.utils import is_torchdynamo_compiling

from kfconvert import ModelConverter, export, load, save, validate_optimization
from kfconvert.capture.tracer import trace
from kfconvert.inputs.example import ExampleCall
from kfconvert.runtime.recording.variant import Variant
from kfconvert.runtime.state.configuration import recorded_reads

DEADLINE = 20.0


def process_state():
    """What belongs to all threads, and conversions, their traces or their trial calls replace."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())} | {logging.lastResort}
    return {
        "streams": (sys.stdout, sys.stderr),
        "warnings": (warnings.filters, list(warnings.filters), warnings.showwarning, warnings._showwarnmsg_impl),
        "logging": (logging.root.manager.disable, {id(handler): list(handler.filters) for handler in handlers}),
        "compiling": torch.compiler.is_compiling(),
        "functions": (nn.Module.__call__, nn.Module.__getattr__, builtins.max, builtins.min, math.pow),
        "libraries": (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled),
        "modes": _python_dispatch.is_in_torch_dispatch_mode(),
        "dtype": torch.get_default_dtype(),
    }


@pytest.fixture(autouse=True)
def _everything_is_put_back():
    before = process_state()
    yield
    after = process_state()
    assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}


def in_thread(visit):
    """What ``visit`` returns in a thread of its own; it must not wait for this one."""
    results, errors = [], []

    def run():
        try:
            results.append(visit())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive(), "another thread waits for the conversion"
    if errors:
        raise errors[0]
    return results[0]


class Visited(nn.Module):
    """While it is traced, ``visit`` is called in another thread. It holds one layer twice, for which the tracer wraps
    the modules of the whole process."""

    def __init__(self, visit=lambda: None):
        super().__init__()
        self.layer, self.visit = nn.Linear(8, 8), visit
        self.again = self.layer

    def forward(self, x):
        if detect_fake_mode(x) is not None:
            in_thread(self.visit)
        return torch.relu(self.again(torch.relu(self.layer(x))))


def during_a_trace(visit):
    seen = []
    trace(Visited(lambda: seen.append(visit())), ExampleCall((torch.randn(3, 8),)))
    (result,) = seen
    return result


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()


def convert(model, **options):
    return ModelConverter(select="all").convert_model(model, **options)


def test_calls_in_other_threads_use_their_programs_during_a_trace():
    model, x = mlp(), torch.randn(5, 8)
    fused, fresh = (convert(model, input_shape=(2, 8)) for _ in range(2))

    def visit():
        with torch.no_grad():
            return fused(x), fresh(x), model(x)

    with torch.no_grad():
        fused(x)
        for output in during_a_trace(visit):
            torch.testing.assert_close(output, model(x))
        fresh(x)
    assert fused.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}
    assert fresh.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}


@pytest.fixture(scope="module", autouse=True)
def exported_before():
    """PyTorch sets up the logs of its exporter at the first use in a process, for good."""
    torch.export.export(mlp(), (torch.ones(1, 8),))


def during_an_export(visit):
    """As ``during_a_trace``, of what the exporter runs of a converted model."""
    fused, seen = convert(mlp(), input_shape=(3, 8)), []
    traced = Variant.traced

    def visited(variant, leaves):
        if not seen:
            seen.append(in_thread(visit))
        return traced(variant, leaves)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Variant, "traced", visited)
        export(fused, torch.randn(3, 8))
    return seen[0]


@pytest.mark.parametrize("during", [during_a_trace, during_an_export])
def test_other_threads_are_not_told_that_they_are_compiled(during):
    """Code of PyTorch and of libraries asks, and does something else then."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    x, mask = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[2], [5]])

    def visit():
        with torch.no_grad():
            outputs = encoder(x, src_key_padding_mask=mask)
        told = torch.compiler.is_compiling(), torch.compiler.is_exporting(), is_torchdynamo_compiling()
        return outputs, (*told, torch.fx._symbolic_trace.is_fx_tracing())

    outputs, told = during(visit)
    expected, before = visit()
    torch.testing.assert_close(outputs, expected)
    assert told == before == (False,) * 4


def test_other_threads_read_a_shared_configuration_as_it_is():
    config = transformers.BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=8)  # fmt: skip
    model = transformers.BertModel(config)
    with recorded_reads(model) as reads:
        assert model.config.hidden_size == 8 and in_thread(lambda: config.vocab_size) == 8
    assert "hidden_size" in reads and "vocab_size" not in reads
    assert type(config) is transformers.BertConfig


def test_a_second_conversion_waits_for_the_first_and_exceptions_end_its_turn():
    order, begun = [], threading.Event()

    class Slow(Visited):
        def forward(self, x):
            order.append(threading.current_thread().name)
            begun.set()
            if threading.current_thread().name == "failing" and detect_fake_mode(x) is not None:
                raise SystemExit("in the midst of a trace")
            return super().forward(x)

    def run():
        with contextlib.suppress(SystemExit):
            convert(Slow(), input_shape=(2, 8), inplace=True)

    threads = [threading.Thread(target=run, name=name) for name in ("failing", "second", "third")]
    for thread in threads:
        thread.start()
        begun.wait(DEADLINE)
    for thread in threads:
        thread.join(DEADLINE)
    changes = [name for name, last in zip(order, [None, *order]) if name != last]
    assert sorted(changes) == ["failing", "second", "third"]


def conv_net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()).eval()


def test_four_threads_convert_while_four_call(tmp_path):
    kinds = {mlp: (2, 8), conv_net: (1, 3, 10, 10), Visited: (2, 8)}
    models = [(make().eval(), shape) for make, shape in kinds.items()]
    alone = [convert(model, input_shape=shape) for model, shape in models]
    sites = [fused.kfconvert_info()["total_replaced"] for fused in alone]
    assert min(sites) > 0
    path = save(alone[0], tmp_path / "saved")
    calls = []
    for fused, (model, shape) in zip(alone, models):
        x = torch.randn(3, *shape[1:])
        with torch.no_grad():
            calls += [(fused, x, model(x)), (model, x, model(x))]
    failures, found, done = [], [], threading.Event()

    def converting(which):
        if which == 3:
            fused, replaced = load(path, model=copy.deepcopy(models[0][0])), sites[0]
        else:
            model, shape = models[which]
            fused, replaced = convert(model, input_shape=shape), sites[which]
            assert validate_optimization(model, fused, torch.ones(shape)).passed
            with torch.no_grad():
                _, x, expected = calls[2 * which]
                torch.testing.assert_close(export(fused, torch.ones(shape)).module()(x), expected)
        found.append(fused.kfconvert_info()["total_replaced"] == replaced)

    def calling(index):
        number = 0
        while not done.is_set():
            fused, x, expected = calls[(index + number) % len(calls)]
            with torch.no_grad():
                torch.testing.assert_close(fused(x), expected)
            number += 1
        assert number > 3

    def guarded(work, index):
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    with contextlib.redirect_stdout(io.StringIO()):
        callers = [threading.Thread(target=guarded, args=(calling, index)) for index in range(4)]
        converters = [threading.Thread(target=guarded, args=(converting, index)) for index in range(4)]
        before, random = process_state(), torch.get_rng_state()
        for thread in callers + converters:
            thread.start()
        for thread in converters:
            thread.join()
        done.set()
        for thread in callers:
            thread.join()
        after = process_state()
    assert not failures, failures
    assert found == [True] * 4
    assert {key for key in before if before[key] != after[key]} == set() and torch.equal(torch.get_rng_state(), random)
    for fused in alone:
        assert fused.kfconvert_info()["guard"]["misses"] == {}
