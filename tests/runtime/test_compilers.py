"""torch.compile, torch.export and torch.jit on converted models: they get the original, and say so once."""

import warnings

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter
from kfconvert.runtime.compilers import ScriptingError

WORDS = "see the original forward of {}, without what was fused in it"


class Branching(nn.Module):
    """Its two linear layers are captured, it is not."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.layers(x) if x.shape[0] < 100 and float(x.detach().sum()) < 1e9 else x


def whole():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()


def convert(model):
    return ModelConverter(select="all").convert_model(model, input_shape=(2, 8))


@pytest.fixture(autouse=True)
def _nothing_compiled_yet():
    """Dynamo takes what it compiled for one model for others of the same structure."""
    torch._dynamo.reset()


def compiled(model, x, **options):
    return torch.compile(model, backend="eager", **options)


WAYS = {
    "compile": compiled,
    "compile, fullgraph": lambda model, x: compiled(model, x, fullgraph=True),
    "compile in place": lambda model, x: model.compile(backend="eager") or model,
    "export": lambda model, x: torch.export.export(model, (x,), strict=False).module(),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "jit.trace": lambda model, x: torch.jit.trace(model, x),
}


def ours(recorded):
    return [str(warning.message) for warning in recorded if "kfconvert" in str(warning.message)]


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("way", WAYS)
def test_a_compiler_gets_the_original_and_one_warning(way, recwarn):
    model, x = whole(), torch.randn(2, 8)
    fused = convert(model)
    with torch.no_grad():
        traced = WAYS[way](fused, x)
        for _ in range(3):
            torch.testing.assert_close(traced(x), model(x))
        (message,) = ours(recwarn)
        assert WORDS.format("Sequential") in message and "\n" not in message
        recwarn.clear()
        WAYS[way](fused, x)(x)
        assert ours(recwarn) == []
        assert fused.kfconvert_info()["guard"]["misses"] == {}


@pytest.mark.filterwarnings("always")
def test_the_warning_is_in_no_graph_and_breaks_none(recwarn):
    fused, graphs = convert(whole()), []
    torch.compile(fused, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(torch.randn(2, 8))
    (graph,) = graphs
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert len(names) == 3 and not any("warn" in name for name in names)
    assert len(ours(recwarn)) == 1


@pytest.mark.filterwarnings("always")
def test_parts_are_told_of_under_the_name_of_the_model(recwarn):
    fused = convert(Branching().eval())
    assert fused.kfconvert_info()["parts"]
    compiled(fused, None)(torch.randn(2, 8))
    (message,) = ours(recwarn)
    assert WORDS.format("Branching") in message


@pytest.mark.filterwarnings("always")
def test_a_conversion_of_a_converted_model_is_no_compiler(recwarn):
    model = nn.Sequential(convert(whole()), nn.Linear(8, 8)).eval()
    assert convert(model).kfconvert_info()["total_replaced"] == 3
    assert ours(recwarn) == []


@pytest.mark.parametrize("make", [whole, lambda: Branching().eval()])
def test_scripting_is_refused_in_one_line(make):
    fused = convert(make())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        with pytest.raises(ScriptingError, match="^torch.jit.script cannot compile the forward of a") as refusal:
            torch.jit.script(fused)
    assert "\n" not in str(refusal.value)
    # Others who ask take it for an attribute that is not there.
    assert not any(hasattr(module.forward, "__globals__") for module in fused.modules() if "forward" in vars(module))
