"""What a save takes, and what is there while it runs: states of odd kinds, kills, others that save and load."""

import os
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file
from test_artifact import BATCH, SmallNet, contents, converted, small_net
from torch import nn

import kfconvert
from kfconvert import folders
from kfconvert.artifact import files as artifact
from kfconvert.artifact import saving
from kfconvert.artifact.errors import ArtifactError
from kfconvert.converter import ModelConverter

FILES = ["graphs.json", "kfconvert.json", "model.safetensors", "report.html"]


@pytest.fixture(scope="module")
def original() -> nn.Module:
    return small_net()


@pytest.fixture(scope="module")
def fused(original) -> nn.Module:
    return converted(original, input_shape=BATCH)


class Quantized(torch.Tensor):
    """As torchao's weights are: a tensor that is made of others, and has no storage of its own."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        plain = [each.values.to(each.scale) * each.scale if isinstance(each, cls) else each for each in args]
        return function(*plain, **(kwargs or {}))


def quantized(weight: torch.Tensor) -> torch.Tensor:
    return Quantized((weight * 10).to(torch.int8), torch.tensor([0.1]))


ODD_STATES = {
    "Quantized": lambda w: nn.Parameter(quantized(w), requires_grad=False),
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
def test_states_of_other_kinds_are_refused_before_anything_is_written(original, tmp_path, kind):
    model = converted(original, input_shape=BATCH)
    path = saving.save(model, tmp_path / "net")
    before = contents(path)
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


def test_a_name_that_the_format_of_the_weights_keeps_for_itself(original, tmp_path):
    """safetensors writes such a tensor without a word, and cannot read the file."""
    model = converted(original, input_shape=BATCH)
    path = saving.save(model, tmp_path / "net")
    before = contents(path)
    model.register_parameter("__metadata__", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ArtifactError, match="the state '__metadata__' has a name that safetensors reserves"):
        saving.save(model, path)
    assert contents(path) == before


def test_lazily_conjugated_tensors_are_stored_as_they_are(original, tmp_path):
    model = converted(original, input_shape=BATCH)
    model.register_buffer("phase", torch.tensor([1 + 2j]).conj())
    saving.save(model, tmp_path / "net")
    assert torch.equal(load_file(tmp_path / "net" / "model.safetensors")["phase"], torch.tensor([1 - 2j]))


def test_a_recipe_that_is_no_json_is_one_line(fused, tmp_path):
    for recipe in ({"kind": float("inf")}, {"kind": object()}, {"kind": {1: {2}}}):
        with pytest.raises(ArtifactError, match="cannot write .*not JSON") as caught:
            saving.save(fused, tmp_path / "net", source=recipe)
        assert "\n" not in str(caught.value) and os.listdir(tmp_path) == []


def test_at_every_moment_of_a_save_the_old_or_the_new_is_there(fused, original, tmp_path, monkeypatch):
    """As copied before each change of a name, where a kill or a failing machine would leave it."""
    path, moments = saving.save(fused, tmp_path / "net"), []
    copying = False

    def noting(call):
        def noted(*args, **kwargs):
            nonlocal copying
            if not copying:
                copying = True
                moments.append(shutil.copytree(path, tmp_path / f"moment {len(moments)}"))
                copying = False
            return call(*args, **kwargs)

        return noted

    changed = converted(original, input_shape=BATCH)
    changed.scale += 1.0
    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "rmdir"):
            patch.setattr(os, name, noting(getattr(os, name)))
        saving.save(changed, path)
    assert len(moments) >= 5
    scales = []
    for copy in moments:
        scales.append(artifact.load(copy, model=SmallNet).scale.item())
        saving.save(fused, copy)
        assert sorted(os.listdir(copy)) == FILES
    first = scales.index(3.0)
    assert scales == [2.0] * first + [3.0] * (len(moments) - first) and 0 < first < len(moments)


def test_saves_and_loads_at_the_same_time_all_succeed(fused, tmp_path):
    """Of threads here and of processes: a load between finds one of them whole, by its checksums."""
    path = saving.save(fused, tmp_path / "net")
    failures: list[BaseException] = []

    def attempt(action) -> None:
        try:
            for _ in range(5):
                action()
        except BaseException as error:
            failures.append(error)

    actions = [lambda: saving.save(fused, path)] * 4 + [lambda: artifact.read_record(path)] * 2
    threads = [threading.Thread(target=attempt, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and os.listdir(tmp_path) == ["net"]
    assert sorted(os.listdir(path)) == FILES
    artifact.load(path, model=SmallNet)


def test_what_a_folder_holds_is_seen_whole_while_it_is_written(tmp_path):
    def write(times):
        for _ in range(times):
            with folders.replacing(tmp_path) as folder:
                (folder / "a").touch()
                (folder / "b").touch()

    write(1)
    writers = [threading.Thread(target=write, args=(100,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert folders.names(tmp_path) == {"a", "b"}


def test_saving_into_the_working_directory_keeps_it(fused, tmp_path, monkeypatch):
    (tmp_path / "net").mkdir()
    monkeypatch.chdir(tmp_path / "net")
    for _ in range(2):
        saving.save(fused, ".")
        assert sorted(os.listdir(".")) == FILES
        artifact.load(".", model=SmallNet)
    (tmp_path / "net" / ".kfconvert-0.partial").mkdir()  # of a save that was killed: no reason to refuse the folder
    saving.save(fused, ".")


def test_what_stands_in_the_place_of_a_save_is_left_alone(fused, tmp_path):
    """A link that leads to another artifact, a folder in the place of a file: refused, and nothing has changed."""
    for name in ("other", "here", "taken"):
        kfconvert.save(fused, tmp_path / name)
    (tmp_path / "here" / ".kfconvert.complete").symlink_to(tmp_path / "other")
    with pytest.raises(kfconvert.ArtifactError):
        kfconvert.save(fused, tmp_path / "here")
    assert {entry.name for entry in (tmp_path / "other").iterdir()} == set(FILES)
    (tmp_path / "taken" / "kfconvert.json").unlink()
    (tmp_path / "taken" / "kfconvert.json").mkdir()
    with pytest.raises(kfconvert.ArtifactError):
        kfconvert.save(fused, tmp_path / "taken")
    assert {entry.name for entry in (tmp_path / "taken").iterdir()} == set(FILES)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_buffers_that_no_state_dict_has_are_those_of_the_saved_model(dtype, tmp_path):
    torch.manual_seed(0)
    model, x = Positions().eval().to(dtype), torch.randn(2, 8, 16, dtype=dtype)
    model.table.mul_(2)
    saved = ModelConverter(select="all", validate_accuracy=False).convert_model(model, example_inputs=x)
    kfconvert.save(saved, tmp_path / "saved")
    again = kfconvert.load(tmp_path / "saved", model=Positions())
    assert again.table.dtype is dtype and torch.equal(again.table, model.table)
    assert again(x).dtype is dtype
    torch.testing.assert_close(again(x), saved(x), rtol=0, atol=0)
    Positions().load_state_dict(load_file(tmp_path / "saved" / artifact.WEIGHTS_FILE))


def test_a_damaged_file_of_buffers(tmp_path):
    model = ModelConverter(select="all").convert_model(Positions().eval(), example_inputs=torch.randn(2, 8, 16))
    kfconvert.save(model, tmp_path)
    file = tmp_path / artifact.BUFFERS_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged"):
        kfconvert.load(tmp_path, model=Positions())
    file.unlink()
    with pytest.raises(ArtifactError, match="missing"):
        kfconvert.load(tmp_path, model=Positions())


def test_buffers_of_an_artifact_that_was_replaced_are_not_read(fused, original, tmp_path):
    model = ModelConverter(select="all").convert_model(Positions().eval(), example_inputs=torch.randn(2, 8, 16))
    kfconvert.save(model, tmp_path)
    kfconvert.save(fused, tmp_path)
    again = kfconvert.load(tmp_path, model=SmallNet())
    x = torch.randn(BATCH)
    with torch.no_grad():
        torch.testing.assert_close(again(x), original(x))
