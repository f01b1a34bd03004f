"""Where a call in a graph, or a failure of the exporter, is in the model's own source."""

import functools
import types

import pytest
import torch
import torchvision
from torch import nn

from kfconvert.capture.tracer import trace
from kfconvert.converter import ModelConverter
from kfconvert.graph.nodes import mark_weights
from kfconvert.graph.sources import at, blame, location
from kfconvert.inputs.example import ExampleCall
from kfconvert.matching.matcher import find
from kfconvert.patterns import REGISTRY
from kfconvert.region.region import CaptureError


def line_of(function, text):
    """``file:line`` of the first line of ``function`` that holds ``text``."""
    code = function.__code__
    with open(code.co_filename) as file:
        lines = list(enumerate(file, 1))[code.co_firstlineno - 1 :]
    return f"{code.co_filename}:{next(number for number, line in lines if text in line)}"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.soft, self.fc = nn.Conv2d(3, 4, 3), nn.Softmax(1), nn.Linear(4, 4)

    def forward(self, x):
        x = self.conv(x)
        x = self.soft(x)
        x = nn.functional.elu(x).mean((2, 3))
        y = self.fc(x)
        return torch.relu(y) + torch.sin(y)


IMAGE = (torch.randn(2, 3, 8, 8),)


def graph_of(model, inputs):
    region = trace(model.eval(), ExampleCall(inputs))
    mark_weights(region.graph, (*region.slots, *region.constants))
    return region.graph


def call(graph, name):
    return next(node for node in graph.nodes if name in str(node.target))


def test_a_call_is_at_the_models_own_line_and_not_in_torch():
    graph = graph_of(Net(), IMAGE)
    assert location(call(graph, "conv2d")) == line_of(Net.forward, "self.conv(x)")
    assert location(call(graph, "linear")) == line_of(Net.forward, "self.fc(x)")
    assert location(call(graph, "sin")) == line_of(Net.forward, "torch.sin(y)")


def test_a_call_of_a_library_is_told_from_the_package_on():
    graph = graph_of(torchvision.models.resnet18(), (torch.randn(2, 3, 32, 32),))
    place = location(call(graph, "adaptive_avg_pool2d"))
    assert place.startswith("torchvision/models/resnet.py:") and place.rpartition(":")[2].isdecimal()


def test_a_node_without_a_source():
    assert location(call(graph_of(nn.Sequential(nn.ReLU()), IMAGE), "relu")) is None  # torch's own code alone
    graph = torch.fx.Graph()
    assert location(graph.placeholder("x")) is None


def test_a_near_miss_is_at_the_call_that_stood_in_the_way():
    misses = {miss.site: miss for miss in find(graph_of(Net(), IMAGE), REGISTRY).near_misses}
    assert "aten.elu" in misses["soft"].reason
    assert misses["soft"].location == line_of(Net.forward, "elu(x)")
    assert "also used by aten.sin" in misses["fc"].reason
    assert misses["fc"].location == line_of(Net.forward, "torch.sin(y)")


def test_a_near_miss_without_such_a_call_is_at_its_own():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.soft = nn.Softmax(1)

        def forward(self, x):
            return self.soft(x)

    (miss,) = find(graph_of(Last(), IMAGE), REGISTRY).near_misses
    assert "the model's output" in miss.reason and miss.location == line_of(Last.forward, "self.soft(x)")


def test_statistics_and_the_warning_carry_the_place():
    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.soft = nn.Softmax(1)

        def forward(self, x):
            return nn.functional.elu(self.soft(x))

    place, converter = line_of(Only.forward, "elu("), ModelConverter()
    with pytest.warns(UserWarning, match="fused nothing in Only.*attention at soft: ") as warned:
        converter.convert_model(Only(), input_shape=(1, 3, 8, 8))
    assert [str(w.message).endswith(f" ({place})") for w in warned if "fused nothing" in str(w.message)] == [True]
    assert converter.conversion_stats["near_misses"][0]["location"] == place


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def conversion_to_a_number(x):
    return torch.ones(int(x.sum().item()))


def nonzero(x):
    return x.nonzero().tolist()


def numpy(x):
    return torch.from_numpy(x.numpy() * 2)


def raises(x):
    raise ValueError("not today")


def layer(x):
    return nn.Linear(5, 5)(x)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (branch, "if x.sum()"),
        (conversion_to_a_number, "int(x.sum().item())"),
        (nonzero, "tolist()"),
        (numpy, "x.numpy()"),
        (raises, "raise ValueError"),
        (layer, "nn.Linear"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_captured_is_blamed_on_its_line(function, text):
    with pytest.raises(CaptureError) as failed:
        trace(nn.Sequential(Calls(function)), ExampleCall((torch.rand(4, 4),)))
    assert blame(failed.value.__cause__) == line_of(function, text)
    assert blame(failed.value) == line_of(function, text)


def test_an_error_behind_the_error_is_asked():
    with pytest.raises(ValueError) as raised:
        raises(None)
    caused, followed, replaced = (RuntimeError("torch gave up") for _ in range(3))
    caused.__cause__ = followed.__context__ = replaced.__context__ = raised.value
    raised.value.__context__ = caused  # a cycle, as errors that are raised again can make
    assert blame(caused) == blame(followed) == line_of(raises, "raise ValueError")
    replaced.__suppress_context__ = True  # raise ... from None
    assert blame(replaced) is None


def test_frames_in_the_text_are_read_where_there_is_no_traceback():
    text = (
        "Could not guard on data-dependent expression u0 > 3\n\nUser Stack (most recent call last):\n"
        '  File "/x/lib/python3.12/site-packages/pkg/models/net.py", line 24, in forward\n    if y.shape[0] > 3:\n'
        f'  File "{torch.__file__}", line 10, in __bool__\n'
    )
    assert blame(RuntimeError(text)) == "pkg/models/net.py:24"


@pytest.mark.parametrize("error", [ValueError("no frames"), RuntimeError(f'File "{torch.__file__}", line 1')])
def test_nobody_is_blamed_where_nothing_is_known(error):
    assert blame(error) is None and at(blame(error)) == ""


def test_the_standard_library_and_generated_code_are_passed_over():
    own = line_of(raises, "raise ValueError").rpartition(":")[0]
    for file in (types.__file__, "<string>", "<eval_with_key>.3", "<frozen importlib._bootstrap>"):
        assert blame(RuntimeError(f'File "{own}", line 3\nFile "{file}", line 8')) == f"{own}:3"
    typed = 'File "<ipython-input-3-abc>", line 2, in forward'
    assert blame(RuntimeError(typed)) == "<ipython-input-3-abc>:2"


def told(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def untold(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def with_options(*_):
    return told


class Decorated(nn.Module):
    """What stands in the way is in a method, behind decorators; ``forward`` is behind others."""

    def __init__(self, method):
        super().__init__()
        self.linear, self.method, self.calls = nn.Linear(4, 4), method, 0
        self.register_buffer("scale", torch.ones(4))

    @told
    @with_options(
        "of several",
        "lines",
    )
    def forward(self, x):
        return getattr(self, self.method)(torch.relu(self.linear(x)))

    @told
    @untold
    def buffer(self, x):
        self.scale.mul_(1.5)
        return x * self.scale

    @told
    @untold
    def hidden(self, x):
        self.linear.weight.data.mul_(1.5)
        return x

    @told
    @untold
    def assigned(self, x):
        self.calls += 1
        return x * self.calls

    @told
    @untold
    def compiling(self, x):
        return x if torch.compiler.is_compiling() else x + 1

    @told
    @untold
    def caught(self, x):
        try:
            return x + x.new_ones(3)
        except RuntimeError:
            return x

    @told
    @untold
    def gradient(self, x):
        x.requires_grad_(True)
        return x


LINES = {
    # Trial runs find these, and do not know the line.
    "buffer": "def forward",
    "hidden": "def forward",
    "assigned": "def forward",
    "compiling": "is_compiling()",
    "caught": "new_ones(3)",
    "gradient": "def forward",
}


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("method", LINES)
def test_decorators_are_not_to_blame(method):
    converter = ModelConverter(effort="fast")
    converter.convert_model(Decorated(method).eval(), input_shape=(2, 4))
    region = converter.conversion_stats["regions"][0]
    assert not region["captured"]
    code = Decorated.__init__.__code__
    with open(code.co_filename) as file:
        lines = list(enumerate(file, 1))[code.co_firstlineno - 1 :]
    number = next(number for number, line in lines if LINES[method] in line)
    assert region["location"] == f"{code.co_filename}:{number}", region["reason"]
