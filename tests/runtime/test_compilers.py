"""torch.compile, torch.export and torch.jit.trace on converted models: they get the program with the operators of this
package, or the original and one warning."""

import copy
import warnings

import numpy
import pytest
import torch
from support.small_models import MAKERS, converted, inputs_of
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor import exc as inductor_errors
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kfconvert import ModelConverter
from kfconvert.runtime.compilers import ScriptingError

WORDS = "gets the original forward of {}, without what was fused in it: "


class Branching(nn.Module):
    """Its two linear layers are captured, it is not."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.layers(x) if x.shape[0] < 100 and float(x.detach().sum()) < 1e9 else x


class Block(nn.Module):
    """What a compiled model can be changed in. (batch, 8) -> (batch, 8)"""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = nn.Linear(16, 8)
        self.raw = nn.Parameter(torch.randn(8, 8))  # its fused module has it under another name
        self.dropout = nn.Dropout(0.5)
        self.scale, self.options, self.factors = 1.0, {"k": 2.0}, [1.0]

    def forward(self, x, shift=None, power=1):
        y = self.down(self.act(self.up(self.norm(x)))) * self.scale * self.options["k"] * self.factors[0]
        y = F.relu(F.linear(self.dropout(y), self.raw)) ** power
        return y if shift is None else y + shift


def whole():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()


def block():
    torch.manual_seed(0)
    return Block().eval()


def convert(model):
    return ModelConverter(select="all").convert_model(model, input_shape=(2, 8))


@pytest.fixture(scope="module")
def fused_block():
    return convert(block())


@pytest.fixture(autouse=True)
def _nothing_compiled_yet():
    """Dynamo takes what it compiled for one model for others of the same structure."""
    torch._dynamo.reset()


class Compiled:
    """``torch.compile(model, fullgraph=True)``, and the graphs that it made."""

    def __init__(self, model, **options):
        self.graphs = []
        self._call = torch.compile(model, backend=self._keep, **{"fullgraph": True, **options})

    def _keep(self, graph, _):
        self.graphs.append(graph)
        return graph

    def __call__(self, *args, **kwargs):
        return self._call(*args, **kwargs)

    @property
    def is_fused(self):
        return bool(ours(self.graphs[-1].graph))


def ours(graph):
    """The calls of operators of this package."""
    return [node for node in graph.nodes if str(node.target).startswith("kfconvert.")]


def traced_by_jit(model, x):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        return torch.jit.trace(model, x)


WAYS = {
    "compile": lambda model, x: torch.compile(model, backend="eager"),
    "compile, fullgraph": lambda model, x: torch.compile(model, backend="eager", fullgraph=True),
    "compile in place": lambda model, x: model.compile(backend="eager") or model,
    "export": lambda model, x: torch.export.export(model, (x,), strict=False).module(),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "jit.trace": traced_by_jit,
}


def told(recorded):
    """What was said of compilers. (torch.jit.trace also runs the model as it is, to compare with it.)"""
    return [str(warning.message) for warning in recorded if "kfconvert: a compiler" in str(warning.message)]


def tensors(outputs):
    values = outputs.values() if isinstance(outputs, dict) else [outputs]
    return [value for value in values if isinstance(value, torch.Tensor)]


def assert_close(actual, expected):
    assert type(actual) is type(expected)
    torch.testing.assert_close(tensors(actual), tensors(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("way", WAYS)
def test_compilers_get_the_program_and_no_warning(way, recwarn):
    model, x = whole(), torch.randn(2, 8)
    fused = convert(model)
    with torch.no_grad():
        traced = WAYS[way](fused, x)
        for _ in range(3):
            torch.testing.assert_close(traced(x), model(x))
    assert told(recwarn) == []
    assert fused.kfconvert_info()["guard"]["misses"] == {}


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("way", WAYS)
def test_where_they_get_the_original_one_warning_says_why(way, recwarn):
    model, x = whole(), torch.randn(2, 8)
    fused = convert(model)
    for each in (model, fused):
        each[0].register_forward_hook(lambda module, args, output: output * 2)
    with torch.no_grad():
        traced = WAYS[way](fused, x)
        for _ in range(3):
            torch.testing.assert_close(traced(x), model(x))
        (message,) = told(recwarn)
        assert WORDS.format("Sequential") + "0 has hooks" in message and "\n" not in message
        recwarn.clear()
        WAYS[way](fused, x)(x)
        assert told(recwarn) == []


@pytest.mark.parametrize("gradients", [False, True])
def test_a_compiled_model_calls_our_operators_and_nothing_of_the_original(make, original, fused, gradients):
    compiled = Compiled(fused)
    with torch.set_grad_enabled(gradients):
        for batch in (2, 3):  # the second time with a free size
            inputs = inputs_of(original, batch)
            assert_close(compiled(**inputs), original(**inputs))
            assert compiled.is_fused
            assert not [node for node in calls(compiled.graphs[-1].graph) if not node.users]


# What Dynamo puts into graphs where code asks for it.
QUESTIONS = (getattr, torch._C._are_functorch_transforms_active)


def calls(graph):
    nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    return [node for node in nodes if node.target not in QUESTIONS]


def test_gradients_of_a_compiled_model_are_those_of_the_original(original, fused):
    compiled, inputs = Compiled(fused), inputs_of(original)
    for model, call in ((original, original), (fused, compiled)):
        sum(output.square().sum() for output in tensors(call(**inputs))).backward()
    for ours_, theirs in zip(fused.parameters(), original.parameters()):
        torch.testing.assert_close(ours_.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_parts_are_fused_where_the_whole_is_not():
    fused, x = convert(Branching().eval()), torch.randn(2, 8)
    assert fused.kfconvert_info()["parts"]
    compiled = Compiled(fused, fullgraph=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), fused.layers(x))
    assert any(ours(graph.graph) for graph in compiled.graphs)


def scaled(module, *_):
    return lambda *args: 2 * type(module).forward(module, *args)


# What is changed in a model after it was compiled, and whether its program still serves it.
AFTERWARDS = {
    "eps": (lambda model: setattr(model.norm, "eps", 0.5), False),
    "a number": (lambda model: setattr(model, "scale", 3.0), False),
    "in a dict": (lambda model: model.options.update(k=5.0), False),
    "in a list": (lambda model: model.factors.__setitem__(0, 7.0), False),
    "approximate": (lambda model: setattr(model.act, "approximate", "tanh"), False),
    "another activation": (lambda model: setattr(model, "act", nn.ReLU()), False),
    "another layer": (lambda model: setattr(model, "up", nn.Linear(8, 16)), False),
    "a forward": (lambda model: setattr(model.act, "forward", torch.tanh), False),
    "a bias less": (lambda model: setattr(model.up, "bias", None), False),
    "train mode": (lambda model: model.train(), False),
    "a part in train mode": (lambda model: model.dropout.train(), False),
    "weights in place": (lambda model: model.up.weight.data.mul_(2), True),
    "another weight": (lambda model: setattr(model.up, "weight", nn.Parameter(torch.randn(16, 8))), True),
    "another weight of another name": (lambda model: setattr(model, "raw", nn.Parameter(torch.randn(8, 8))), True),
    "its data": (lambda model: setattr(model.raw, "data", torch.randn(8, 8)), True),
    "another norm weight": (lambda model: setattr(model.norm, "weight", nn.Parameter(torch.randn(8))), True),
    "a state dict": (lambda model: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}), True),
    "frozen": (lambda model: model.requires_grad_(False), True),
}


@pytest.mark.parametrize("what", AFTERWARDS)
@pytest.mark.filterwarnings("ignore:kfconvert")
def test_changes_after_the_compilation_are_followed(what, fused_block):
    change, is_fused = AFTERWARDS[what]
    original, fused, x = block(), copy.deepcopy(fused_block), torch.randn(2, 8)
    compiled = Compiled(fused)
    compiled(x)
    assert compiled.is_fused
    for model in (original, fused):
        torch.manual_seed(1)
        change(model)
    results = []
    for call in (compiled, original):
        torch.manual_seed(2)
        results.append(call(x))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert compiled.is_fused is is_fused


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {})) * (2 if function is F.linear else 1)


def with_another_eps(model):
    def call(x):
        model.norm.eps = 0.5
        return model(x)

    return call


def under(manager):
    def around(model):
        def call(x):
            with manager():
                return model(x)

        return call

    return around


# Calls within compiled code in which the program must not stand for the original.
AROUND = {
    "an attribute assigned there": with_another_eps,
    "a mode": under(Doubling),
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "functional_call": lambda model: lambda x: torch.func.functional_call(model, {"raw": torch.ones(8, 8)}, (x,)),
    "torch.func.grad": lambda model: torch.func.grad(lambda x: model(x).sum()),
    "other arguments": lambda model: lambda x: model(x, x),
    "another value of a default": lambda model: lambda x: model(x, power=2),
    "a checkpoint": lambda model: lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
}


@pytest.mark.parametrize("what", AROUND)
@pytest.mark.filterwarnings("always")
def test_where_the_program_does_not_apply_the_original_is_compiled(what, fused_block, recwarn):
    fused, x = copy.deepcopy(fused_block), torch.randn(2, 8)
    compiled = Compiled(AROUND[what](fused))
    torch.testing.assert_close(compiled(x), AROUND[what](block())(x), rtol=1e-4, atol=1e-5)
    assert not compiled.is_fused
    assert len(told(recwarn)) == 1


@pytest.mark.parametrize(
    "around",
    [
        under(torch.no_grad),
        lambda model: lambda x: model(x, None, 1),
        lambda model: lambda x: model(x) + model(x * 2),
        lambda model: nn.Sequential(model, nn.ReLU()),
    ],
)
def test_around_these_calls_it_applies(around, fused_block):
    compiled, x = Compiled(around(copy.deepcopy(fused_block))), torch.randn(2, 8)
    torch.testing.assert_close(compiled(x), around(block())(x), rtol=1e-4, atol=1e-5)
    assert compiled.is_fused


def test_a_compiled_model_goes_by_the_mode_around_it(fused_block):
    fused, x = copy.deepcopy(fused_block), torch.randn(2, 8)
    compiled, original = Compiled(fused), Compiled(block())
    compiled(x)
    with Doubling():
        results = compiled(x), original(x)
    torch.testing.assert_close(*results)
    assert not compiled.is_fused


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        y = F.gelu(self.up(x))
        torch._dynamo.graph_break()
        return F.relu(self.down(y))


def test_what_breaks_into_several_graphs_runs_once_and_as_it_was():
    x = torch.randn(2, 8)
    model = Broken().eval()
    fused = ModelConverter(select="all").convert_model(model, input_shape=(2, 8))
    compiled = Compiled(fused, fullgraph=False)
    torch.testing.assert_close(compiled(x), model(x))
    assert sum(len(calls(graph.graph)) for graph in compiled.graphs) == 4


FREE = {"batch": torch.export.Dim("batch", min=2, max=8)}


@pytest.mark.parametrize("strict, gradients", [(False, False), (True, True)])
def test_exported_programs_call_our_operators(original, fused, strict, gradients):
    inputs = inputs_of(original)
    free = {name: {0: FREE["batch"]} for name in inputs}
    with torch.set_grad_enabled(gradients):
        program = torch.export.export(fused, (), inputs, dynamic_shapes=free, strict=strict)
    assert ours(program.graph)
    again = program.module()
    for batch in (2, 5):
        inputs = inputs_of(original, batch)
        assert_close(again(**inputs), original(**inputs))
    # It has gradients however it was exported.
    sum(output.sum() for output in tensors(again(**inputs)) if output.is_floating_point()).backward()
    sum(output.sum() for output in tensors(original(**inputs)) if output.is_floating_point()).backward()
    expected = {name: p.grad for name, p in original.named_parameters()}
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "compile in place"])
def test_the_converted_model_itself_goes_on_as_before(way, fused_block):
    fused, x = copy.deepcopy(fused_block), torch.randn(2, 8)
    with torch.no_grad():
        fused(x)
        WAYS[way](fused, x)(x)
        hits = fused.kfconvert_info()["guard"]["hits"]
        for model in (fused, copy.deepcopy(fused)):
            torch.testing.assert_close(model(x), block()(x), rtol=1e-4, atol=1e-5)
            assert model.kfconvert_info()["guard"] == {"hits": hits + 1, "misses": {}}


def test_convolutions_in_a_graph_have_their_own_weights():
    compiled = Compiled(converted(MAKERS["cnn"]))
    with torch.no_grad():
        compiled(**inputs_of(MAKERS["cnn"]()))
    graph = compiled.graphs[-1].graph
    weights = [node.args[1] for node in graph.nodes if node.target is torch.conv2d]
    assert len(weights) == 2 and all(weight.op == "placeholder" for weight in weights)
    assert "kfconvert.scale_shift_act_inference.default" in {str(node.target) for node in ours(graph)}


def test_a_traced_cnn_calls_our_operators_and_holds_to_its_sizes():
    original, fused = MAKERS["cnn"](), converted(MAKERS["cnn"])
    with torch.no_grad():
        traced = traced_by_jit(fused, inputs_of(original)["x"])
    assert "kfconvert::" in str(traced.inlined_graph)
    x = inputs_of(original, 5)["x"]
    torch.testing.assert_close(traced(x), original(x), rtol=1e-4, atol=1e-5)
    assert traced(x).requires_grad
    with pytest.raises(RuntimeError, match="sum exactly to 16"):
        traced(torch.randn(5, 3, 16, 16))


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("way", WAYS)
def test_onnx_gets_the_original(way, fused_block, recwarn, monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    x = torch.randn(2, 8)
    torch.testing.assert_close(WAYS[way](copy.deepcopy(fused_block), x)(x), block()(x))
    (message,) = told(recwarn)
    assert "ONNX" in message


@pytest.mark.filterwarnings("always")
def test_a_conversion_of_a_converted_model_is_no_compiler(recwarn):
    model = nn.Sequential(convert(whole()), nn.Linear(8, 8)).eval()
    assert convert(model).kfconvert_info()["total_replaced"] == 3
    assert told(recwarn) == []


@pytest.mark.parametrize("build", [whole, lambda: Branching().eval()])
def test_scripting_is_refused_in_one_line(build):
    fused = convert(build())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        with pytest.raises(ScriptingError, match="^torch.jit.script cannot compile the forward of a") as refusal:
            torch.jit.script(fused)
    assert "\n" not in str(refusal.value)
    # Others who ask take it for an attribute that is not there.
    assert not any(hasattr(module.forward, "__globals__") for module in fused.modules() if "forward" in vars(module))


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.scale


@pytest.mark.filterwarnings("ignore:kfconvert")
@torch.no_grad()
def test_floats_that_dynamo_takes_for_symbols():
    # Of a float that had two values at one place Dynamo makes a symbol, and guards on no value any more.
    x = torch.randn(2, 8)
    for scale in (2.0, 3.0, numpy.float64(2.5)):
        model = Scaled(scale).eval()
        fused = ModelConverter(select="all").convert_model(model, example_inputs=x)
        compiled = torch.compile(fused, backend="eager")
        for value in (scale, type(scale)(4.5), type(scale)(5.5)):
            model.scale = fused.scale = value
            torch.testing.assert_close(compiled(x), model(x))


def test_inductor_writes_no_text_of_what_our_operators_take(monkeypatch):
    """It doubles with each residual connection in front of an operator."""
    written, own = [], inductor_errors.OperatorIssue.operator_str

    def noted(target, *rest):
        written.append(target)
        return own(target, *rest)

    monkeypatch.setattr(inductor_errors.OperatorIssue, "operator_str", noted)
    model, x = whole(), torch.randn(2, 8)
    fused = convert(model)
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):  # else it is met no more
        torch.testing.assert_close(torch.compile(fused)(x), model(x), rtol=1e-4, atol=1e-5)
    assert fused.kfconvert_info()["guard"]["misses"] == {} and not written
