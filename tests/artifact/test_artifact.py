"""Saving and loading converted models: complete or not at all, and safe to open."""

import copy
import errno
import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.artifacts import contents, refusal, rewrite
from torch import nn

from kfconvert import folders, load, save, zoo
from kfconvert.artifact import files as artifact
from kfconvert.artifact import saving
from kfconvert.artifact.errors import ArtifactError
from kfconvert.artifact.schema import FORMAT
from kfconvert.converter import ModelConverter
from kfconvert.inputs import spec as input_spec
from kfconvert.json_values import json_ready
from kfconvert.zoo.architectures import ARCHITECTURES

BATCH = (2, 3, 8, 8)
TINY_BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 12,
}


class SmallNet(nn.Module):
    """Two convolutions with BatchNorm, a linear layer, and a buffer that is no parameter."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)) + x)
        return torch.relu(self.head(x.mean((2, 3)))) * self.scale


def small_net() -> nn.Module:
    torch.manual_seed(0)
    model = SmallNet().eval()
    for bn in (model.bn1, model.bn2):
        bn.running_mean.normal_()
        bn.running_var.uniform_(0.5, 2)
    return model


def converted(model: nn.Module, **inputs) -> nn.Module:
    converter = ModelConverter(validate_accuracy=False, select="all", effort="fast")
    return converter.convert_model(model, **inputs)


@pytest.fixture(scope="module")
def original() -> nn.Module:
    return small_net()


@pytest.fixture(scope="module")
def fused(original) -> nn.Module:
    model = converted(original, input_shape=BATCH)
    assert model.kfconvert_info()["total_replaced"] > 0
    return model


@pytest.fixture(scope="module")
def saved(fused, tmp_path_factory):
    return saving.save(fused, tmp_path_factory.mktemp("saved") / "deep" / "net")


def test_round_trip(saved, fused, original):
    loaded = artifact.load(saved, model=SmallNet)
    x = torch.randn(BATCH)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), original(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(loaded(x), fused(x))
    info, before = loaded.kfconvert_info(), fused.kfconvert_info()
    assert type(loaded) is SmallNet and not loaded.training and info["guard"]["hits"] == 2
    for key in ("total_replaced", "sites", "layout", "timings", "speedup_achieved"):
        assert info[key] == json_ready(before[key]), key
    assert os.listdir(saved.parent) == ["net"]


def test_weights_file_fits_the_original_class_strictly(saved, original):
    fresh = SmallNet()
    fresh.load_state_dict(load_file(saved / "model.safetensors"), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), original.state_dict().values()))


def test_rejected_sites_stay_rejected_and_nothing_is_timed(path, monkeypatch):
    statistics = json.loads((path / "kfconvert.json").read_text())["statistics"]
    statistics["sites"][0].update(status="rejected", reason="not faster: for the test", strategy=None)
    rewrite(path, statistics=statistics)
    for name in ("timing", "selector"):
        monkeypatch.setattr(f"kfconvert.conversion.{name}.compare_timings", lambda *_, **__: pytest.fail("timed"))
    info = artifact.load(path, model=SmallNet).kfconvert_info()
    assert info["total_replaced"] == statistics["total_replaced"] - 1
    assert [s["reason"] for s in info["sites"] if s["status"] == "rejected"].count("not faster: for the test") == 1


def test_all_call_forms_come_back(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny-bert", ("BertConfig", TINY_BERT))
    entry = zoo.resolve("tiny-bert", weights="random")
    model = ModelConverter(validate_accuracy=False, select="all").convert_model(entry.model, input_shape=(2, 8))
    loaded = artifact.load(saving.save(model, tmp_path / "bert", source=entry.recipe))
    ids = torch.randint(1, 50, (3, 6))
    with torch.no_grad():
        for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
            torch.testing.assert_close(loaded(**inputs)[0], entry.model(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert loaded.kfconvert_info()["guard"] == model.kfconvert_info()["guard"] | {"hits": 2, "misses": {}}


def test_a_model_by_name_needs_only_the_path(tmp_path):
    entry = zoo.resolve("timm:resnet10t", weights="random")
    x = torch.randn(1, 3, 64, 64)
    saving.save(converted(entry.model, example_inputs=x), tmp_path / "net", source=entry.recipe)
    with torch.no_grad():
        torch.testing.assert_close(artifact.load(tmp_path / "net")(x), entry.model(x), rtol=1e-4, atol=1e-5)


def test_tied_tensors_are_stored_under_every_key(tmp_path):
    config = transformers.BertConfig(**TINY_BERT)
    original = transformers.BertForMaskedLM(config).eval()
    assert original.cls.predictions.decoder.weight is original.bert.embeddings.word_embeddings.weight
    saving.save(converted(original, input_shape=(1, 6)), tmp_path / "lm")
    tensors = load_file(tmp_path / "lm" / "model.safetensors")
    assert tensors.keys() == original.state_dict().keys()
    transformers.BertForMaskedLM(config).load_state_dict(tensors, strict=True)
    loaded = artifact.load(tmp_path / "lm", model=transformers.BertForMaskedLM(config))
    assert loaded.cls.predictions.decoder.weight is loaded.bert.embeddings.word_embeddings.weight


def test_dtypes_come_back_one_by_one(tmp_path):
    model = small_net().to(torch.bfloat16)
    model.scale = model.scale.double()
    path = saving.save(converted(model, input_shape=BATCH), tmp_path / "net")
    loaded = artifact.load(path, model=SmallNet())
    assert {k: v.dtype for k, v in loaded.state_dict().items()} == {k: v.dtype for k, v in model.state_dict().items()}
    assert json.loads((path / "kfconvert.json").read_text())["dtype"] == "bfloat16"


def test_replaces_an_artifact_and_nothing_else(fused, path, tmp_path):
    (path / "kfconvert.json").write_text('{"format": 0}')
    saving.save(fused, path)
    assert artifact.read_record(path)["format"] == FORMAT and os.listdir(tmp_path) == ["net"]
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="notes.txt"):
        saving.save(fused, path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(ArtifactError, match="not a kfconvert artifact"):
        saving.save(fused, tmp_path / "other")
    with pytest.raises(ArtifactError, match="is a file"):
        saving.save(fused, path / "notes.txt")
    (tmp_path / "empty").mkdir()
    saving.save(fused, tmp_path / "empty")


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("moment", ["weights", "record", "flush"])
def test_failure_at_any_moment_leaves_the_old_artifact(fused, path, tmp_path, monkeypatch, failure, moment):
    before = contents(path)

    def fail(*args, **kwargs):
        raise failure

    with monkeypatch.context() as patch:
        if moment == "flush":
            patch.setattr(folders.os, "fsync", fail)
        else:
            patch.setattr(saving, {"weights": "write_tensors", "record": "sealed"}[moment], fail)
        with pytest.raises(ArtifactError if isinstance(failure, OSError) else KeyboardInterrupt):
            saving.save(fused, path)
        with pytest.raises(BaseException):  # noqa: B017
            saving.save(fused, tmp_path / "new" / "net")
    assert contents(path) == before and os.listdir(tmp_path) == ["net"]


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(ArtifactError, match="not a converted model"):
        saving.save(nn.Linear(2, 2), tmp_path / "net")

    class WithState(nn.Linear):
        def get_extra_state(self):
            return {"any": object()}

        def set_extra_state(self, state):
            pass

    model = nn.Sequential(WithState(4, 4), nn.ReLU()).eval()
    with pytest.raises(ArtifactError, match="_extra_state.*only tensors"):
        saving.save(converted(model, input_shape=(2, 4)), tmp_path / "net")
    assert os.listdir(tmp_path) == []


def test_architecture_must_be_known_and_fit(saved, tmp_path):
    assert "pass model=" in refusal(saved)
    assert "size mismatch" in refusal(saved, model=SmallNet(width=4))
    assert "on the device meta, where" in refusal(saved, model=SmallNet().to("meta"))
    assert "Linear takes arguments" in refusal(saved, model=nn.Linear)
    assert "not a kfconvert artifact" in refusal(tmp_path / "nowhere")


def test_code_that_a_recipe_names_runs_only_with_trust(path, tmp_path, monkeypatch):
    (tmp_path / "code_of_recipe.py").write_text("raise SystemExit('the recipe was run')\n")
    monkeypatch.chdir(tmp_path)
    recipe = {"kind": "callable", "name": "code_of_recipe:make", "weights": "own"}
    rewrite(path, recipe=recipe)
    assert "trust_source" in refusal(path)
    artifact.load(path, model=SmallNet)
    (tmp_path / "trusted_code.py").write_text(
        "from test_artifact import SmallNet\ndef make():\n    return SmallNet()\n"
    )
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    rewrite(path, recipe={**recipe, "name": "trusted_code:make"})
    assert artifact.load(path, trust_source=True).kfconvert_info()["total_replaced"] > 0


def test_recorded_gpu_that_is_missing_is_told(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rewrite(path, device="cuda:0")
    seen = []
    with pytest.warns(UserWarning, match="converts it for the CPU"):
        loaded = artifact.load(path, model=SmallNet, on_miss=seen.append)
    assert next(loaded.parameters()).device.type == "cpu"
    loaded.train()
    loaded(torch.randn(2, 3, 8, 8))
    assert len(seen) == 1


def test_device_that_is_not_there(path):
    for device in ("foo", "cuda:99"):
        assert f"device {device} cannot be used" in refusal(path, model=SmallNet, device=device)
    rewrite(path, device="foo")
    assert "device foo cannot be used" in refusal(path, model=SmallNet)


def test_model_that_was_not_captured_is_saved_and_loaded_unfused(tmp_path):
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) if float(x.sum()) > 0 else x

    with pytest.warns(UserWarning, match="fused nothing"):
        model = converted(Opaque().eval(), input_shape=(2, 4))
    loaded = artifact.load(saving.save(model, tmp_path / "net"), model=Opaque)
    assert loaded.kfconvert_info()["nothing_fused"] == model.kfconvert_info()["nothing_fused"]
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "inputs",
    [
        torch.randn(2, 3),
        {"a": torch.tensor([[3, 9]]), "flag": True, "none": None},
        (torch.ones(2, dtype=torch.bool), [torch.zeros(1, dtype=torch.float16), 5, "text", 0.5]),
        torch.zeros(0, 3),
        torch.zeros(0, dtype=torch.long),
    ],
)
def test_input_descriptions(inputs):
    spec = json.loads(json.dumps(input_spec.described(inputs)))
    built = input_spec.build(spec)
    (ours, spec_a), (theirs, spec_b) = (torch.utils._pytree.tree_flatten(value) for value in (inputs, built))
    assert spec_a == spec_b
    for one, other in zip(ours, theirs):
        if not isinstance(one, torch.Tensor):
            assert one == other
            continue
        assert one.shape == other.shape and one.dtype == other.dtype
        if one.numel() and not one.is_floating_point():
            assert other.min() >= one.min() and other.max() <= one.max()


def test_inputs_that_cannot_be_described():
    assert input_spec.described((object(),)) is None
    assert input_spec.described((torch.ones(2).to_sparse(),)) is None


def test_the_layout_of_the_example_is_kept(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    fused = ModelConverter(select="all", effort="fast").convert_model(
        copy.deepcopy(model), example_inputs=x.to(memory_format=torch.channels_last)
    )
    save(fused, tmp_path / "saved")
    again = load(tmp_path / "saved", model=copy.deepcopy(model))
    with torch.no_grad():
        for each in (fused, again):
            for image in (x, x.to(memory_format=torch.channels_last)):
                assert each(image).stride() == model(image).stride()
            assert each.kfconvert_info()["guard"]["hits"] == 1


class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))))


@pytest.mark.filterwarnings("ignore:kfconvert fused nothing")
def test_weights_that_are_tied_only_where_they_are_loaded(tmp_path):
    save(converted(Tied(False).eval(), input_shape=(2, 4)), tmp_path / "saved")
    with pytest.raises(ArtifactError, match="first.weight and second.weight are one"):
        load(tmp_path / "saved", model=Tied(True))
    save(converted(Tied(True).eval(), input_shape=(2, 4)), tmp_path / "tied")
    load(tmp_path / "tied", model=Tied(True))
