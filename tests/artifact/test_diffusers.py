"""Converted models of diffusers: copies, and the folder of ``save_pretrained``, which both libraries read."""

import copy
import importlib.util
import os
import pickle
from pathlib import Path

import diffusers
import pytest
import torch
from support.selection import exhaustive

import kfconvert
from kfconvert import zoo
from kfconvert.artifact import ArtifactError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SIZES = {
    "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 1,
    "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10,
}  # fmt: skip
WEIGHTS = "diffusion_pytorch_model.safetensors"
X = {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}


def transformer(**sizes):
    torch.manual_seed(0)
    return diffusers.DiTTransformer2DModel(**{**SIZES, **sizes}).eval()


@pytest.fixture(scope="module")
def fused():
    return kfconvert.auto_convert_model(transformer(), example_inputs=X, select="all", effort="fast")


def sample(model):
    with torch.no_grad():
        return model(**X).sample


def is_served(model):
    before = model.kfconvert_info()["guard"]["hits"]
    sample(model)
    return model.kfconvert_info()["guard"]["hits"] == before + 1


def assert_reads(folder, fused):
    """Both libraries read the folder, and what ours reads is converted."""
    torch.testing.assert_close(sample(diffusers.DiTTransformer2DModel.from_pretrained(folder).eval()), sample(fused))
    loaded = kfconvert.load(folder)
    assert type(loaded) is diffusers.DiTTransformer2DModel and is_served(loaded)
    assert torch.equal(sample(loaded), sample(fused))


def test_what_diffusers_notes_in_a_configuration_is_no_change(fused, tmp_path):
    model = copy.deepcopy(fused)
    assert is_served(model)
    model.save_config(tmp_path)
    model.register_to_config(_name_or_path="folder")
    assert is_served(model) and is_served(copy.deepcopy(model))
    torch.testing.assert_close(sample(pickle.loads(pickle.dumps(model))), sample(model))


def test_a_configuration_with_more_than_the_arguments_of_the_class_is_read(tmp_path):
    blocks = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
    model = diffusers.AutoencoderTiny(**blocks, num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)).eval()
    x = torch.rand(1, 3, 16, 16)
    fused = kfconvert.auto_convert_model(model, example_inputs={"sample": x}, select="all", effort="fast")
    fused.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(kfconvert.load(tmp_path)(x).sample, model(x).sample, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [*exhaustive({}), {"max_shard_size": 20_000}], ids=["one file", "in parts"])
def test_both_libraries_read_what_was_saved(options, fused, tmp_path, traces):
    fused.save_pretrained(tmp_path / "out", **options)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"kfconvert.json", "graphs.json", "report.html", "config.json"} <= names
    assert (WEIGHTS in names) == (not options)
    assert_reads(tmp_path / "out", fused)
    assert not traces and is_served(fused)


def test_copies_and_loaded_models_save_themselves(fused, tmp_path):
    copied = copy.deepcopy(fused)
    with torch.no_grad():
        copied.proj_out_2.bias.add_(1)
    copied.save_pretrained(tmp_path / "out")
    assert_reads(tmp_path / "out", copied)
    assert not torch.equal(sample(copied), sample(fused))
    loaded = kfconvert.load(tmp_path / "out")
    loaded.save_pretrained(tmp_path / "again")
    assert_reads(tmp_path / "again", copied)
    kfconvert.save(fused, tmp_path / "saved")
    assert torch.equal(sample(kfconvert.load(tmp_path / "saved")), sample(fused))


def test_what_cannot_be_read_again_is_told(fused, tmp_path):
    with pytest.warns(UserWarning, match="kfconvert.load will not read this folder"):
        fused.save_pretrained(tmp_path, safe_serialization=False)
    changed = copy.deepcopy(fused)
    changed.transformer_blocks[0].norm3.eps = 0.5
    with pytest.warns(UserWarning, match="kfconvert.load will need model=") as told:
        changed.save_pretrained(tmp_path / "changed")
    assert len(told) == 1
    with pytest.raises(ArtifactError, match="pass model="):
        kfconvert.load(tmp_path / "changed")


@pytest.mark.parametrize("by", ["push_to_hub", "save_pretrained"])
def test_the_hub_gets_the_same_files(by, fused, tmp_path, monkeypatch):
    sent = []

    class Card:
        def save(self, path):
            Path(path).write_text("card")

    for module in (diffusers.models.modeling_utils, diffusers.utils.hub_utils):
        monkeypatch.setattr(module, "create_repo", lambda name, **_: type("Repository", (), {"repo_id": name}))
        monkeypatch.setattr(module, "load_or_create_model_card", lambda *_, **__: Card())
        monkeypatch.setattr(module, "populate_model_card", lambda card: card)
    monkeypatch.setattr(
        diffusers.utils.hub_utils, "upload_folder", lambda folder_path, **_: sent.append(set(os.listdir(folder_path)))
    )
    if by == "push_to_hub":
        fused.push_to_hub("me/fused", token="secret")
    else:
        fused.save_pretrained(str(tmp_path), push_to_hub=True, repo_id="me/fused", token="secret")
    (names,) = sent
    assert {"kfconvert.json", "report.html", "graphs.json", "config.json", WEIGHTS} <= names
    assert "_upload_folder" not in vars(fused)


HOSTILE = {
    "no argument": {"class": "DiTTransformer2DModel", "config": {**SIZES, "unknown": 1}},
    "a path": {"class": "DiTTransformer2DModel", "config": {**SIZES, "norm_type": "../secret"}},
    "another class": {"class": "DiffusionPipeline", "config": {}},
}


@pytest.mark.parametrize("recipe", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_recipe_is_refused(recipe):
    with pytest.raises(zoo.ZooError):
        zoo.rebuild({"kind": "diffusers", **recipe})


def test_where_it_is_not_installed_one_line_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(zoo.ZooError, match="DiTTransformer2DModel needs the package diffusers: pip install diffusers"):
        zoo.rebuild({"kind": "diffusers", "class": "DiTTransformer2DModel", "config": {}})
