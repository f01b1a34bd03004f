"""What a save takes: states of odd kinds, recipes, names of folders, and buffers outside of the state dict."""

import copy
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.artifacts import contents, refusal
from test_artifact import BATCH, SmallNet, converted, small_net
from torch import nn

import kfconvert
from kfconvert.artifact import files as artifact
from kfconvert.artifact import saving
from kfconvert.artifact.errors import ArtifactError
from kfconvert.artifact.schema import BUFFERS_FILE, WEIGHTS_FILE
from kfconvert.modules import FusedLinear

FILES = ["graphs.json", "kfconvert.json", "model.safetensors", "report.html"]


@pytest.fixture(scope="module")
def original() -> nn.Module:
    return small_net()


@pytest.fixture(scope="module")
def fused(original) -> nn.Module:
    return converted(original, input_shape=BATCH)


@pytest.fixture(scope="module")
def saved(fused, tmp_path_factory):
    return saving.save(fused, tmp_path_factory.mktemp("saved") / "net")


ODD_STATES = {
    "Mine": lambda w: nn.Parameter(w.as_subclass(type("Mine", (torch.Tensor,), {}))),
    "sparse": lambda w: nn.Parameter(w.to_sparse()),
    "sparse, ": lambda w: nn.Parameter(w.to_sparse_csr()),
    "quantized": lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
    "nested": lambda w: torch.nested.nested_tensor([w[0], w[1]]),
    "NestedTensor": lambda w: torch.nested.nested_tensor([w[0], w[1]], layout=torch.jagged),
    "without data": lambda w: nn.Parameter(w.to("meta")),
    "UninitializedParameter": lambda w: nn.UninitializedParameter(),
    "complex128": lambda w: w.to(torch.complex128),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD_STATES)
def test_states_of_other_kinds_are_refused_before_anything_is_written(fused, original, path, tmp_path, kind):
    model, before = copy.deepcopy(fused), contents(path)
    odd = ODD_STATES[kind](original.head.weight.detach())
    if isinstance(odd, nn.Parameter):
        model.head.weight = odd
    else:
        model.register_buffer("odd", odd)
    with pytest.raises(ArtifactError, match=f"the state '(head.weight|odd)' .*{kind.rstrip(', ')}") as caught:
        saving.save(model, path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ArtifactError):
        saving.save(model, tmp_path / "new" / "other")
    assert contents(path) == before and os.listdir(tmp_path) == ["net"]


def test_a_name_that_the_format_of_the_weights_keeps_for_itself(fused, path):
    """safetensors writes such a tensor without a word, and cannot read the file."""
    model, before = copy.deepcopy(fused), contents(path)
    model.register_parameter("__metadata__", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ArtifactError, match="the state '__metadata__' has a name that safetensors reserves"):
        saving.save(model, path)
    assert contents(path) == before


def test_lazily_conjugated_tensors_are_stored_as_they_are(fused, tmp_path):
    model = copy.deepcopy(fused)
    model.register_buffer("phase", torch.tensor([1 + 2j]).conj())
    saving.save(model, tmp_path / "net")
    assert torch.equal(load_file(tmp_path / "net" / "model.safetensors")["phase"], torch.tensor([1 - 2j]))


def test_a_recipe_that_is_no_json_is_one_line(fused, tmp_path):
    for recipe in ({"kind": float("inf")}, {"kind": object()}, {"kind": {1: {2}}}):
        with pytest.raises(ArtifactError, match="cannot write .*not JSON") as caught:
            saving.save(fused, tmp_path / "net", source=recipe)
        assert "\n" not in str(caught.value) and os.listdir(tmp_path) == []


def test_saving_into_the_working_directory_keeps_it(fused, tmp_path, monkeypatch):
    (tmp_path / "net").mkdir()
    monkeypatch.chdir(tmp_path / "net")
    for _ in range(2):
        saving.save(fused, ".")
        assert sorted(os.listdir(".")) == FILES
        artifact.load(".", model=SmallNet)


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b", "\ud800"], ids=["long", "deep", "null", "surrogate"])
def test_names_that_no_folder_can_have(fused, tmp_path, name):
    for call in (lambda: kfconvert.save(fused, f"{tmp_path}/{name}"), lambda: kfconvert.load(f"{tmp_path}/{name}")):
        with pytest.raises(kfconvert.ArtifactError) as raised:
            call()
        assert "\n" not in str(raised.value)


class Positions(nn.Module):
    """Adds a table that no state dict has."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.register_buffer("table", torch.sin(torch.arange(128.0).view(8, 16)), persistent=False)

    def forward(self, x):
        return nn.functional.gelu(self.norm(self.linear(x))) + self.table


@pytest.fixture(scope="module")
def with_positions(tmp_path_factory):
    torch.manual_seed(0)
    model = Positions().eval().to(torch.bfloat16)
    model.table.mul_(2)
    fused = converted(model, example_inputs=torch.randn(2, 8, 16, dtype=torch.bfloat16))
    return fused, kfconvert.save(fused, tmp_path_factory.mktemp("saved") / "net")


def test_buffers_that_no_state_dict_has_are_those_of_the_saved_model(with_positions):
    fused, saved = with_positions
    again, x = kfconvert.load(saved, model=Positions()), torch.randn(2, 8, 16, dtype=torch.bfloat16)
    assert again.table.dtype is torch.bfloat16 and torch.equal(again.table, fused.table)
    assert again(x).dtype is torch.bfloat16 and torch.equal(again(x), fused(x))
    Positions().load_state_dict(load_file(saved / WEIGHTS_FILE))


def test_a_damaged_file_of_buffers(with_positions, tmp_path):
    path = shutil.copytree(with_positions[1], tmp_path / "net")
    file = path / BUFFERS_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "damaged" in refusal(path, model=Positions())
    file.unlink()
    assert "missing" in refusal(path, model=Positions())


def test_buffers_of_an_artifact_that_was_replaced_are_not_read(with_positions, fused, original, tmp_path):
    path = shutil.copytree(with_positions[1], tmp_path / "net")
    kfconvert.save(fused, path)
    assert sorted(os.listdir(path)) == FILES
    x = torch.randn(BATCH)
    with torch.no_grad():
        torch.testing.assert_close(kfconvert.load(path, model=SmallNet())(x), original(x))


def test_an_unpickled_model_is_not_saved_without_its_programs(fused, tmp_path):
    with pytest.raises(ArtifactError, match="was unpickled, which loses fused programs"):
        saving.save(pickle.loads(pickle.dumps(fused)), tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


def test_load_takes_a_module_or_its_class(saved):
    with pytest.raises(ArtifactError, match="takes a module or a class of modules, not str"):
        kfconvert.load(saved, model="llama")


def test_weights_change_where_other_kernels_are_than_at_the_conversion(tmp_path, monkeypatch):
    """The recorded strategies then do not apply, and the strategies in their place must not keep old weights."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512), nn.ReLU()).eval()

    with monkeypatch.context() as patched:
        patched.setattr(FusedLinear, "strategies", lambda self, x: ["kernel", "composition"])
        model = kfconvert.auto_convert_model(make(), input_shape=(256, 512), select="all")
    saving.save(model, tmp_path / "artifact")
    monkeypatch.setattr("kfconvert.extension.EXTENSION_LOADED", False)
    loaded, plain, x = kfconvert.load(tmp_path / "artifact", model=make()), make(), torch.randn(256, 512)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), plain(x))
        for each in (loaded, plain):
            each.load_state_dict({name: 2 * value for name, value in each.state_dict().items()})
        torch.testing.assert_close(loaded(x), plain(x))
    assert loaded.kfconvert_info()["guard"]["hits"] >= 2
