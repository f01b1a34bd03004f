"""Graphs that an artifact keeps: loading makes no trace where the model is what it was, and is as right and as watchful
as after one; and nothing that they say runs."""

import json
import os
import random
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from support import stored_net
from support.artifacts import rewrite_graphs
from support.stored_net import Block, Net
from torch import nn

from kfconvert.artifact import files as artifact
from kfconvert.artifact import replay, saving
from kfconvert.artifact.errors import ArtifactError
from kfconvert.artifact.graphs import Graphs
from kfconvert.converter import ModelConverter
from kfconvert.region import stored_graph
from kfconvert.runtime.dispatch.guarded import guarded_forward

IDS = torch.arange(10).reshape(2, 5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    fused = ModelConverter(select="all").convert_model(Net().eval(), example_inputs=IDS)
    return saving.save(fused, tmp_path_factory.mktemp("saved") / "net")


def outputs(model, ids=IDS):
    with torch.no_grad():
        return model(ids)


def regions(model):
    every = map(guarded_forward, model.modules())
    return list({id(v.region): v.region for guarded in every if guarded for v in guarded.variants}.values())


def test_nothing_is_traced_and_all_is_as_after_a_trace(path, traces, monkeypatch):
    loaded = artifact.load(path, model=Net())
    assert not traces
    rewrite_graphs(path, None)
    traced = artifact.load(path, model=Net())
    assert traces
    for key in ("sites", "part_sites", "near_misses", "unmatched_activations", "regions", "dynamic"):
        assert loaded.kfconvert_info()[key] == traced.kfconvert_info()[key]
    for ids in (IDS, IDS[:1], IDS[:, :1], IDS[:1, :1], torch.arange(12)[None], torch.randint(20, (5, 7))):
        ours, theirs = outputs(loaded, ids), outputs(traced, ids)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert loaded.kfconvert_info()["guard"] == traced.kfconvert_info()["guard"]
    for one, other in zip(regions(loaded), regions(traced), strict=True):
        assert (one.guard, one.slots, one.outputs, one.reads) == (other.guard, other.slots, other.outputs, other.reads)
        assert [node["name"] for node in stored_graph(one)["nodes"]] == [
            node["name"] for node in stored_graph(other)["nodes"]
        ]


def test_a_graph_that_requires_layouts_is_the_only_one_to_trace(tmp_path, traces):
    torch.manual_seed(0)
    fused = ModelConverter(select="all").convert_model(Net().eval(), example_inputs=IDS)
    part = guarded_forward(fused.blocks[0]).variants[0].region
    part.has_fixed_layouts = True
    saving.save(fused, tmp_path / "net")
    traces.clear()
    loaded = artifact.load(tmp_path / "net", model=Net())
    assert traces and all(isinstance(each, Block) for each in traces)
    assert torch.equal(outputs(loaded)["hidden"], outputs(fused)["hidden"])


def test_with_all_graphs_the_model_is_not_even_called(path, traces, monkeypatch):
    called = []
    monkeypatch.setattr(replay, "_settled", lambda *_: called.append(1) or (lambda: None))
    artifact.load(path, model=Net())
    assert not called and not traces


def test_in_another_process_nothing_is_traced_either(saved):
    """Where texts have other hashes, sets another order, and a shell tells another command by ``_``."""
    code = (
        "from support.stored_net import Net\n"
        "from kfconvert.artifact import files as artifact\n"
        "from kfconvert.capture import tracer\n"
        "tracer._export = None\n"
        f"print(artifact.load({str(saved)!r}, model=Net()).kfconvert_info()['total_replaced'])"
    )
    others = {"PYTHONHASHSEED": "5", "_": "/usr/bin/another", "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    environment = os.environ | others
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(artifact.read_record(saved)["statistics"]["total_replaced"])


def test_a_hugging_face_model_is_not_traced(tmp_path, traces):
    """Nor where the model looks, outside of traces, whether a mask hides anything; nor where another model has come, of
    whose classes transformers takes note."""
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    ids = torch.randint(50, (2, 6))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    converter = ModelConverter(select="all", effort="fast")
    model = converter.convert_model(transformers.BertModel(config).eval(), example_inputs=example)
    saving.save(model, tmp_path / "bert")
    traces.clear()
    type("Another", (transformers.BertModel,), {})(config)
    loaded = artifact.load(tmp_path / "bert")
    assert not traces
    with torch.no_grad():
        ours, theirs = (each(**example) for each in (loaded, model))
    assert type(ours) is type(theirs) and torch.equal(ours.last_hidden_state, theirs.last_hidden_state)
    again = artifact.load(saving.save(loaded, tmp_path / "again"))
    assert not traces
    with torch.no_grad():
        ours = again(**example)
        assert torch.equal(ours.pooler_output, theirs.pooler_output)


def test_a_model_with_dicts_in_its_configuration_is_not_traced(tmp_path, traces):
    """These come back in their order, on which its code may depend."""
    config = transformers.Gemma3TextConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=32, use_cache=False,
    )  # fmt: skip
    assert list(config.rope_parameters) != sorted(config.rope_parameters)
    converter = ModelConverter(select="all", effort="fast")
    model = converter.convert_model(transformers.Gemma3TextModel(config).eval(), example_inputs=IDS)
    saving.save(model, tmp_path / "gemma")
    traces.clear()
    assert artifact.load(tmp_path / "gemma").config.rope_parameters == config.rope_parameters
    assert not traces


def test_a_model_with_tuples_in_its_configuration_is_not_traced(tmp_path, traces):
    """The defaults of some classes are tuples, which a file has as lists."""
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, num_mel_bins=4,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=10,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    assert isinstance(config.begin_suppress_tokens, tuple)
    example = {"input_features": torch.randn(2, 4, 20), "decoder_input_ids": IDS}
    converter = ModelConverter(select="all", effort="fast")
    own = transformers.WhisperForConditionalGeneration(config).eval()
    saving.save(converter.convert_model(own, example_inputs=example), tmp_path / "whisper")
    traces.clear()
    artifact.load(tmp_path / "whisper")
    assert not traces


class Doubled(Block):
    def forward(self, x):
        return 2 * super().forward(x)


def other_attribute(monkeypatch):
    model = Net()
    model.blocks[1].scale = 3.0
    return model


def other_class(monkeypatch):
    model = Net()
    model.blocks[0] = Doubled(0)
    return model


def other_code(monkeypatch):
    monkeypatch.setattr(Block, "forward", lambda self, x: self.norm(x - torch.relu(self.up(x)) * self.scale))
    return Net()


def other_function(monkeypatch):
    monkeypatch.setattr(stored_net, "shifted", lambda x: x + 2.0)
    return Net()


def other_function_of_torch(monkeypatch):
    monkeypatch.setattr(torch, "relu", torch.sigmoid)
    return Net()


def other_forward(monkeypatch):
    model = Net()
    model.blocks[0].forward = lambda x: x
    return model


@pytest.mark.parametrize(
    "change",
    [
other_attribute, other_class, other_code, other_function, other_function_of_torch, other_forward    ],
)  # fmt: skip
def test_a_model_that_is_another_now_is_traced(path, traces, monkeypatch, caplog, change):
    model = change(monkeypatch)
    model.load_state_dict(artifact.load_file(path / "model.safetensors"))
    expected = outputs(model.eval())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outputs(artifact.load(path, model=model))
    assert "is traced again" in caplog.text
    assert found.keys() == expected.keys()
    for key in found:
        torch.testing.assert_close(found[key], expected[key])


def test_an_object_in_the_place_of_a_parameter(path, traces):
    """Python finds it before the parameter; no trace tells of it."""
    model = Net()
    vars(model.blocks[0].up)["bias"] = torch.full_like(model.blocks[0].up.bias, 0.5)
    with pytest.raises(ArtifactError, match="cannot be repeated"):
        artifact.load(path, model=model)
    assert traces


@pytest.mark.parametrize("change", [other_code, other_function, other_function_of_torch])
def test_later_changes_are_noticed_as_after_a_trace(path, monkeypatch, traces, change):
    loaded = artifact.load(path, model=Net())
    outputs(loaded)
    assert not traces and loaded.kfconvert_info()["guard"]["hits"] == 1
    change(monkeypatch)
    model = Net()
    model.load_state_dict(loaded.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(outputs(loaded), outputs(model.eval()))
    assert loaded.kfconvert_info()["guard"]["hits"] == 1


def test_later_changes_of_attributes_are_noticed(path, traces):
    loaded = artifact.load(path, model=Net())
    loaded.blocks[1].scale = 4.0
    model = Net()
    model.load_state_dict(loaded.state_dict())
    model.blocks[1].scale = 4.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(outputs(loaded), outputs(model.eval()))
    assert not traces and loaded.kfconvert_info()["guard"]["hits"] == 0


def test_a_model_that_was_changed_before_it_was_saved_keeps_no_graphs(saved, tmp_path):
    loaded = artifact.load(saved, model=Net())
    loaded.blocks[1].scale = 4.0
    assert not (saving.save(loaded, tmp_path / "net") / "graphs.json").exists()


class OfTwoKinds(nn.Module):
    """A buffer of another dtype than the weights, and a tensor that is a plain attribute."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear, self.shift = nn.Linear(8, 8), torch.ones(8, dtype=dtype)
        self.register_buffer("scale", torch.full((8,), 1.1, dtype=torch.bfloat16))

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.scale + self.shift


@pytest.mark.parametrize(
    "change, dtype, keeps",
    [
        (lambda model: model, torch.float32, True),
        (lambda model: model, torch.float64, True),  # of the attribute of the model that is given
        (lambda model: model.float(), torch.float32, False),
    ],
    ids=["as it was", "another attribute", "another buffer"],
)
def test_tensors_of_another_kind(tmp_path, traces, change, dtype, keeps):
    x = torch.randn(4, 8)
    fused = change(ModelConverter(select="all", effort="fast").convert_model(OfTwoKinds().eval(), example_inputs=x))
    path = saving.save(fused, tmp_path / "net")
    assert (path / "graphs.json").exists() == keeps
    traces.clear()
    model = OfTwoKinds(dtype).eval()
    loaded = artifact.load(path, model=model)
    assert bool(traces) == (not keeps or dtype is not torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), type(model).forward(model, x))
    assert loaded.kfconvert_info()["guard"]["hits"] == 1


class OfElements(nn.Module):
    """Looks at the element of an attribute, which is a number in the graph."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), torch.tensor(factor)

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.factor.item()


@pytest.mark.parametrize("factor", [2.0, 1.0])
def test_elements_of_attributes(tmp_path, traces, factor):
    x = torch.randn(4, 8)
    path = saving.save(ModelConverter(select="all").convert_model(OfElements(), example_inputs=x), tmp_path / "net")
    assert (path / "graphs.json").exists()
    traces.clear()
    model = OfElements(factor)
    loaded = artifact.load(path, model=model)
    assert bool(traces) == (factor != 2.0)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), type(model).forward(model, x))
    assert loaded.kfconvert_info()["guard"]["hits"] == 1


class Looking(nn.Module):
    """Asks how its argument lies in memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)) * (1.0 if x.is_contiguous() else 2.0)


class OfOneName(nn.Module):
    """Two classes of one name, of which an attribute is read."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(kind() for kind in (self._made(2.0), self._made(3.0))))

    @staticmethod
    def _made(factor):
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.scale = nn.Linear(8, 8), factor

            def forward(self, x):
                return torch.relu(self.linear(x)) * self.scale

        return Layer

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("kind", [Looking, OfOneName])
def test_graphs_that_cannot_be_known_again_are_not_kept(tmp_path, traces, kind):
    x = torch.randn(3, 8)
    model = ModelConverter(select="all").convert_model(kind().eval(), example_inputs=x)
    path = saving.save(model, tmp_path / "net")
    assert not (path / "graphs.json").exists()
    traces.clear()
    torch.testing.assert_close(outputs(artifact.load(path, model=kind()), x), outputs(model, x))
    assert traces


def test_another_version_of_a_library_is_told(path, traces, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    artifact.load(path, model=Net())
    assert traces and "libraries" in caplog.text


CODE = "__import__('os').environ.__setitem__('KFCONVERT_TEST_RAN', '1')"


def first(graphs):
    return graphs["calls"][0]["graph"]


def last_call(graphs):
    return [node for node in first(graphs)["nodes"] if "calls" in node][-1]


def size_of_expression(graphs, stored):
    first(graphs)["fields"][-1] = {"expression": stored}


HARM = {
    "operator": lambda graphs: last_call(graphs).update(calls="aten.from_file.default"),
    "writing": lambda graphs: last_call(graphs).update(calls="aten.add_.Tensor"),
    "function": lambda graphs: last_call(graphs).update(calls="os.system.default"),
    "name": lambda graphs: first(graphs)["nodes"][0].update(name=f"x={CODE}"),
    "keyword": lambda graphs: last_call(graphs).update(kwargs={"dict": [[f"dtype=None, y={CODE}", 1]]}),
    "size": lambda graphs: first(graphs)["sizes"].update({CODE: [2, 2, None]}),
    "condition": lambda graphs: size_of_expression(graphs, ["LessThan", CODE, 5]),
    "class of expressions": lambda graphs: size_of_expression(graphs, ["Lambda", "s0", "s0"]),
    "class": lambda graphs: first(graphs)["fields"].__setitem__(0, {"class": ["subprocess", "Popen"]}),
    "value": lambda graphs: last_call(graphs).update(args={"tuple": [{"torch": "load"}]}),
    "kind": lambda graphs: last_call(graphs).update(args={"_class": ["os", "system"]}),
    "arguments": lambda graphs: first(graphs)["fields"].__setitem__(0, {"list": []}),
}


def test_a_graph_that_means_harm_is_not_used(path, traces, caplog):
    text = (path / "graphs.json").read_text()
    for kind, harm in HARM.items():
        graphs = json.loads(text)
        harm(graphs)
        caplog.clear()
        assert not Graphs(Net().eval(), torch.device("cpu"), graphs).calls, kind
        assert "is traced again" in caplog.text and "\n" not in caplog.messages[-1]
    rewrite_graphs(path, graphs)
    outputs(artifact.load(path, model=Net()))
    assert traces and "KFCONVERT_TEST_RAN" not in os.environ


def test_a_graph_that_is_nested_without_end_is_refused(path):
    rewrite_graphs(path, '{"tuple":[' * 50_000 + "null" + "]}" * 50_000)
    with pytest.raises(ArtifactError, match="graphs.json is damaged"):
        artifact.load(path, model=Net())


def places(value, found):
    """Every place in JSON values: what holds it, and its key."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(item, (dict, list)):
            places(item, found)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_graph_says_one_line_says_what_is_wrong(path, seed):
    graphs = json.loads((path / "graphs.json").read_text())
    draw = random.Random(seed)
    for holder, key in draw.sample(places(graphs, []), 2):
        holder[key] = draw.choice([None, -1, 10**30, 1.5, True, "", "s0", [], {}, [1, 2], {"node": 0}, {"tuple": []}])
    rewrite_graphs(path, graphs)
    try:
        artifact.load(path, model=Net())
    except ArtifactError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
