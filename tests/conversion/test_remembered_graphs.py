"""Graphs that are kept between conversions: a second conversion of an equal model traces nothing, and any other one
traces."""

import copy
import os
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from support.selection import exhaustive
from support.stored_net import Block, Net
from torch import nn

from kfconvert import ModelConverter
from kfconvert.capture import tracer
from kfconvert.conversion import remembered_graphs

IDS = torch.arange(10).reshape(2, 5)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(remembered_graphs, "is_of_libraries", lambda model: True)
    monkeypatch.setenv("KFCONVERT_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(remembered_graphs, "LEAST_SECONDS", 0.0)
    return tmp_path / "kept"


@pytest.fixture
def traces(monkeypatch):
    """The modules that were traced since."""
    found, own = [], tracer._export
    monkeypatch.setattr(tracer, "_export", lambda model, *rest: (found.append(model), own(model, *rest))[1])
    return found


def converted(model, inputs=IDS, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models in which nothing is fused
        return ModelConverter(**{"select": "all", "effort": "fast"} | options).convert_model(
            model.eval(), example_inputs=inputs
        )


def outputs(model, inputs=IDS):
    with torch.no_grad():
        return model(inputs)


def assert_as_original(fused, original, inputs=IDS):
    """``fused`` serves the call by a program, and computes what ``original`` does."""
    original.load_state_dict(fused.state_dict())
    expected, found = outputs(original.eval(), inputs), outputs(fused, inputs)
    torch.testing.assert_close(found, expected)
    assert fused.kfconvert_info()["guard"]["hits"] == 1


def llama(kind=transformers.LlamaForCausalLM, **options):
    config = {
        "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 64,
        "bos_token_id": 0, "eos_token_id": 49,
    }  # fmt: skip
    return kind(transformers.LlamaConfig(**config | options))


def t5():
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def mamba():
    """Its graphs copy states, and have sizes that are numbers."""
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=0)
    return transformers.MambaForCausalLM(config)


def mixtral():
    """Its graphs divide one of two results in place, and invert a permutation in a new tensor."""
    config = {
        "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 32, "max_position_embeddings": 64, "num_local_experts": 4, "eos_token_id": 49,
    }  # fmt: skip
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**config))


@pytest.mark.parametrize("effort", ["fast", "full"])
def test_the_second_conversion_traces_no_call_and_decides_the_same(folder, traces, effort):
    first = converted(Net(), effort=effort).kfconvert_info()
    assert traces and first["remembered_graphs"] == 0
    traces.clear()
    torch.manual_seed(1)
    second = converted(Net(), effort=effort)
    assert not any(isinstance(each, Net) for each in traces) and bool(traces) == (effort == "full")
    info = second.kfconvert_info()
    assert info["remembered_graphs"] == 1
    for key in ("sites", "part_sites", "near_misses", "unmatched_activations", "regions", "dynamic", "served"):
        assert first[key] == info[key]
    assert_as_original(second, Net())
    for ids in (IDS[:1], IDS[:, :1], IDS[:1, :1], torch.arange(12)[None], torch.randint(20, (5, 7))):
        torch.testing.assert_close(outputs(second, ids), outputs(type(second).forward.__get__(second), ids))
    assert "1 cached graphs used" in str(info)


@pytest.mark.parametrize("make", [llama, mamba, mixtral, *exhaustive(t5)])
def test_models_generate_the_same_tokens(folder, traces, make):
    ids, models = torch.randint(1, 40, (1, 6)), []
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :2]} if make is t5 else {})
    torch.manual_seed(0)
    original = make().eval()
    for _ in range(2):
        traces.clear()
        torch.manual_seed(0)
        models.append(converted(make(), inputs))
    assert not traces
    first, second = (model.kfconvert_info() for model in models)
    assert second["remembered_graphs"] == len([each for each in second["regions"] if each["captured"]]) > 1
    for key in ("sites", "form_sites", "regions", "served"):
        assert first[key] == second[key]
    tokens = [each.generate(ids, max_new_tokens=8, do_sample=False) for each in (original, *models)]
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[2])
    guards = [model.kfconvert_info()["guard"] for model in models]
    assert guards[0] == guards[1] and guards[0]["hits"] > 0
    torch.manual_seed(1)  # with other weights, and so other tokens
    assert converted(make(), inputs).kfconvert_info()["remembered_graphs"] == second["remembered_graphs"]
    assert not traces


def test_graphs_of_own_modules_are_traced_again(folder, monkeypatch):
    """Their code may read settings of other files, which the evidence does not have."""
    monkeypatch.undo()
    monkeypatch.setenv("KFCONVERT_CACHE", str(folder))
    monkeypatch.setattr(remembered_graphs, "LEAST_SECONDS", 0.0)
    assert [converted(Net()).kfconvert_info()["remembered_graphs"] for _ in range(2)] == [0, 0]


def test_in_another_process_nothing_is_traced_either(folder):
    """Where texts have other hashes, and sets another order."""
    code = (
        "import torch\n"
        "from support.stored_net import Net\n"
        "from kfconvert import ModelConverter\n"
        "from kfconvert.conversion import remembered_graphs\n"
        "remembered_graphs.LEAST_SECONDS = 0.0\n"
        "remembered_graphs.is_of_libraries = lambda model: True\n"
        "converter = ModelConverter(select='all', effort='fast')\n"
        "converter.convert_model(Net().eval(), example_inputs=torch.arange(10).reshape(2, 5))\n"
        "print(converter.conversion_stats['remembered_graphs'])"
    )
    found = []
    for seed in ("5", "6"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        found.append(run.stdout.strip())
    assert found == ["0", "1"]


def other_attribute(monkeypatch):
    model = Net()
    model.blocks[1].scale = 3.0
    return model


def other_code(monkeypatch):
    monkeypatch.setattr(Block, "forward", lambda self, x: self.norm(x - torch.relu(self.up(x)) * self.scale))
    return Net()


def other_shape(monkeypatch):
    model = Net()
    model.positions = torch.randn(14, 8)
    return model


def other_version(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    return Net()


def frozen_weights(monkeypatch):
    return Net().requires_grad_(False)


@pytest.mark.parametrize("change", [other_attribute, other_code, other_shape, other_version, frozen_weights])
def test_another_model_is_traced(folder, traces, monkeypatch, change):
    converted(Net())
    traces.clear()
    model = change(monkeypatch)
    fused = converted(copy.deepcopy(model))
    assert traces and fused.kfconvert_info()["remembered_graphs"] == 0
    assert_as_original(fused, model)


@pytest.mark.parametrize("inputs", [IDS[:, :4], IDS.t().contiguous().t(), IDS.int()])
def test_another_call_is_traced(folder, traces, inputs):
    converted(Net())
    traces.clear()
    assert converted(Net(), inputs).kfconvert_info()["remembered_graphs"] == 0 and traces


def body(**options):
    return llama(transformers.LlamaModel, use_cache=False, **options)


@pytest.mark.parametrize("options", [{"rms_norm_eps": 0.5}, *exhaustive({"rope_theta": 5.0}, {"num_hidden_layers": 2})])
def test_another_configuration_is_traced(folder, traces, options):
    converted(body())
    traces.clear()
    fused = converted(body(**options))
    assert traces and fused.kfconvert_info()["remembered_graphs"] == 0


def test_a_later_layer_with_another_attribute_is_traced(folder, traces):
    def changed():
        model = body()
        model.layers[2].input_layernorm.variance_epsilon = 0.5
        return model

    converted(body())
    traces.clear()
    fused = converted(changed())
    assert traces
    original = changed().eval()
    original.load_state_dict(fused.state_dict())
    torch.testing.assert_close(outputs(fused)[0], outputs(original)[0])


FUNCTIONS, FACTORS = {}, [2.0, 3.0]


def defined(operator, factor, default=1.0):
    """A model with a forward of one name and file, whatever the arguments."""
    if operator == "times":

        def forward(self, x, scale=default):
            return torch.relu(self.linear(x)) * factor * scale

    else:

        def forward(self, x, scale=default):
            return torch.relu(self.linear(x)) + factor * scale

    def __init__(self):  # noqa: N807
        nn.Module.__init__(self)
        self.linear = nn.Linear(8, 8)

    return type("Defined", (nn.Module,), {"__init__": __init__, "forward": forward})()


class Registered(nn.Module):
    """Finds a function in a dict, and a number in a list."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return FUNCTIONS["activation"](self.linear(x)) * FACTORS[1]


@pytest.mark.parametrize("again", [("times", 2.0), ("plus", 2.0), ("times", 3.0), ("times", 2.0, 5.0)])
def test_functions_of_one_name_are_told_apart(folder, traces, again):
    x = torch.randn(3, 8)
    converted(defined("times", 2.0), x)
    traces.clear()
    fused = converted(defined(*again), x)
    assert bool(traces) == (again != ("times", 2.0))
    assert_as_original(fused, defined(*again), x)


@pytest.mark.parametrize("activation, factor", [("relu", 3.0), ("relu", 4.0), ("gelu", 3.0)])
def test_code_and_numbers_in_containers_are_told_apart(folder, traces, monkeypatch, activation, factor):
    def function(name):
        return (lambda x: torch.relu(x) + 1.0) if name == "relu" else (lambda x: torch.nn.functional.gelu(x) + 1.0)

    x = torch.randn(3, 8)
    monkeypatch.setitem(FUNCTIONS, "activation", function("relu"))
    converted(Registered(), x)
    traces.clear()
    monkeypatch.setitem(FUNCTIONS, "activation", function(activation))
    monkeypatch.setattr(f"{__name__}.FACTORS", [2.0, factor])
    fused = converted(Registered(), x)
    assert bool(traces) == ((activation, factor) != ("relu", 3.0))
    assert_as_original(fused, Registered(), x)


class Limited(nn.Module):
    """Computes something else for larger batches than its example's."""

    def __init__(self, limit):
        super().__init__()
        self.linear, self.limit = nn.Linear(8, 8), limit

    def forward(self, x):
        x = torch.relu(self.linear(x))
        return x if x.shape[0] < self.limit else -x


def limited(limit):
    return lambda x: torch.relu(x) if x.shape[0] < limit else -x


@pytest.mark.parametrize("limit", [6, 5])
@pytest.mark.parametrize("kind", [Limited, Registered])
def test_differences_that_no_output_of_the_example_shows(folder, traces, monkeypatch, kind, limit):
    """Of an attribute, and of a function in a dict."""
    for each in (6, limit):
        traces.clear()
        monkeypatch.setitem(FUNCTIONS, "activation", limited(each))
        converted(Limited(each) if kind is Limited else Registered(), torch.randn(3, 8))
    assert bool(traces) == (limit != 6)


class Gated(nn.Module):
    """Computes something else for one token, which its outputs show only if the gate is open."""

    def __init__(self, gate):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.full((8,), gate))

    def forward(self, input_ids):
        x = torch.relu(self.linear(self.embedding(input_ids)))
        return x if input_ids.shape[1] == 1 else x + self.gate * torch.tanh(x)


def test_trial_runs_with_weights_of_zero_decide_nothing_for_others(folder, traces):
    converted(Gated(0.0))
    traces.clear()
    fused = converted(Gated(1.0))
    assert traces
    assert_as_original(fused, Gated(1.0))
    original = Gated(1.0).eval()
    original.load_state_dict(fused.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(outputs(fused, IDS[:, :1]), outputs(original, IDS[:, :1]))


def test_trial_runs_with_inputs_of_zero_decide_nothing_for_others(folder, traces):
    x = torch.randn(3, 8)
    converted(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.zeros_like(x))
    traces.clear()
    converted(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), x)
    assert traces


@pytest.mark.parametrize("value", [object(), "text"])
def test_arguments_that_are_no_tensors(folder, traces, value):
    class Taking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, other):
            return torch.relu(self.linear(x))

    for _ in range(2):
        traces.clear()
        converted(Taking(), {"x": torch.randn(3, 8), "other": value})
    assert bool(traces) == (not isinstance(value, str))


def test_a_graph_with_other_outputs_is_not_used(folder, traces, monkeypatch):
    """Although all evidence is the same."""
    converted(Net())
    (path,) = folder.glob("graphs-*.json")
    text = path.read_text()
    path.write_text(text.replace("aten.relu.default", "aten.neg.default"))
    traces.clear()
    fused = converted(Net())
    assert traces and fused.kfconvert_info()["remembered_graphs"] == 0
    assert_as_original(fused, Net())


@pytest.mark.parametrize("content", ["{", "[]", '{"graphs": {}}', "\x00\xff", '{"a":' * 50_000, None])
def test_a_damaged_file_is_ignored_and_replaced(folder, traces, content):
    converted(Net())
    (path,) = folder.glob("graphs-*.json")
    if content is None:  # an operator that no graph may call
        content = path.read_text().replace("aten.relu.default", "aten.from_file.default")
    path.write_text(content)
    traces.clear()
    assert_as_original(converted(Net()), Net())
    assert traces
    traces.clear()
    assert converted(Net()).kfconvert_info()["remembered_graphs"] == 1
    assert not traces


def test_nothing_is_read_or_written_where_it_is_switched_off(folder, traces, monkeypatch, tmp_path):
    converted(Net())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("KFCONVERT_CACHE", "off")
    traces.clear()
    assert converted(Net()).kfconvert_info()["remembered_graphs"] == 0
    assert traces and not (tmp_path / "other").exists()


def test_a_folder_that_cannot_be_written_is_no_obstacle(folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KFCONVERT_CACHE", str(tmp_path / "file" / "kept"))
    assert_as_original(converted(Net()), Net())


def test_short_traces_are_not_kept(folder, monkeypatch):
    monkeypatch.setattr(remembered_graphs, "LEAST_SECONDS", 1000.0)
    converted(Net())
    assert not list(folder.glob("graphs-*"))


def test_the_oldest_files_go_first(folder, traces, monkeypatch):
    monkeypatch.setattr(remembered_graphs, "MOST_FILES", 2)
    for length in (3, 4, 5):
        converted(Net(), IDS[:, :length])
    assert len(list(folder.glob("graphs-*"))) == 2
    found = [converted(Net(), IDS[:, :length]).kfconvert_info()["remembered_graphs"] for length in (5, 4, 3)]
    assert found == [1, 1, 0]


def test_under_a_profiler_calls_are_traced(folder, traces):
    converted(Net())
    traces.clear()
    seen = []

    def profiler(frame, event, argument):
        seen.append(event)

    sys.setprofile(profiler)
    try:
        converted(Net())
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert traces
