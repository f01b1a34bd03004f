"""``save_pretrained`` and ``push_to_hub`` of converted models: what transformers writes, and what ``load`` reads."""

import copy
import operator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.selection import exhaustive

import kfconvert
from kfconvert.artifact import ArtifactError

X = {"input_ids": torch.tensor([[2, 5, 6, 3]])}
HEAD = operator.attrgetter("cls.predictions.decoder.weight")
TABLE = operator.attrgetter("bert.embeddings.word_embeddings.weight")


def language_model():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config).eval()


@pytest.fixture(scope="module")
def fused():
    converter = kfconvert.ModelConverter(select="all", effort="fast", validate_accuracy=False)
    return converter.convert_model(language_model(), example_inputs=X)


def logits(model):
    with torch.no_grad():
        return model(**X).logits


def assert_reads(folder, fused):
    """Both libraries read the folder, and what ours reads is converted."""
    torch.testing.assert_close(logits(transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()), logits(fused))
    loaded = kfconvert.load(folder)
    assert torch.equal(logits(loaded), logits(fused))
    assert loaded.kfconvert_info()["guard"]["hits"] > 0 and HEAD(loaded) is TABLE(loaded)


@pytest.mark.parametrize("options", [{}, *exhaustive({"max_shard_size": 2000})], ids=["one file", "in parts"])
def test_both_libraries_read_what_was_saved(options, fused, tmp_path):
    fused.save_pretrained(tmp_path / "out", **options)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"kfconvert.json", "graphs.json", "report.html", "config.json"} <= names
    assert ("model.safetensors" in names) == (not options)
    assert_reads(tmp_path / "out", fused)


def test_copies_save_themselves(fused, tmp_path):
    copied = copy.deepcopy(fused)
    with torch.no_grad():
        copied.cls.predictions.bias.add_(1)
    copied.save_pretrained(str(tmp_path / "out"))
    assert_reads(tmp_path / "out", copied)
    assert not torch.equal(logits(copied), logits(fused))


def test_files_of_others_stay_and_old_records_go(fused, tmp_path):
    (tmp_path / "README.md").write_text("of the user")
    (tmp_path / "checkpoint-1").mkdir()
    fused.save_pretrained(tmp_path)
    fused.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "of the user"
    assert_reads(tmp_path, fused)
    language_model().save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "kfconvert.json").exists()


def test_weights_of_another_hand_are_told(fused, tmp_path):
    state = {"cls.predictions.bias": torch.zeros(8)}
    fused.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="kfconvert.load will not read this folder: .* does not contain the weights"):
        fused.save_pretrained(tmp_path, state_dict=state)
    assert not (tmp_path / "kfconvert.json").exists()
    with pytest.raises(ArtifactError, match="not a kfconvert artifact"):
        kfconvert.load(tmp_path)


def test_a_model_that_its_configuration_does_not_make_is_told(fused, tmp_path):
    changed = copy.deepcopy(fused)
    norm = next(module for module in changed.modules() if isinstance(module, torch.nn.LayerNorm))
    norm.eps = 0.5
    with pytest.warns(UserWarning, match="kfconvert.load will need model="):
        changed.save_pretrained(tmp_path)


def test_other_processes_write_nothing(fused, tmp_path):
    fused.save_pretrained(tmp_path / "out", is_main_process=False)
    assert not list((tmp_path / "out").iterdir())


def test_damage_is_found_in_each_part(fused, tmp_path):
    fused.save_pretrained(tmp_path, max_shard_size=2000)
    part = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    tensors = load_file(part)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, part, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="does not match its checksum"):
        kfconvert.load(tmp_path)


@pytest.fixture
def sent(monkeypatch):
    """(repository, folder's files by name, weights) of each upload, in the place of a hub."""
    found = []

    def upload(self, folder, repo_id, *args, **kwargs):
        files = {file.name: file for file in Path(folder).iterdir()}
        weights = {}
        for name in sorted(name for name in files if name.endswith(".safetensors") and name.startswith("model")):
            weights |= load_file(files[name])
        found.append((repo_id, set(files), weights))

    class Api:
        def __getattr__(self, name):
            return lambda repo_id="", *args, **kwargs: type("Answer", (), {"repo_id": repo_id, "config": {}})()

    hub = transformers.utils.hub
    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    for module in (hub, transformers.modeling_utils):
        monkeypatch.setattr(module, "hf_api", Api, raising=False)
        monkeypatch.setattr(module, "create_and_tag_model_card", lambda *args, **kwargs: _Card(), raising=False)
    return found


class _Card:
    def save(self, path):
        Path(path).write_text("card")


@pytest.mark.parametrize("by", ["push_to_hub", "save_pretrained"])
def test_the_hub_gets_the_same_files(by, fused, tmp_path, sent):
    if by == "push_to_hub":
        fused.push_to_hub("me/fused", token="secret")
    else:
        fused.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="me/fused", token="secret")
        assert_reads(tmp_path / "out", fused)
    ((repo_id, names, _),) = sent
    assert repo_id == "me/fused" and "_upload_modified_files" not in vars(fused)
    assert {"kfconvert.json", "report.html", "graphs.json", "config.json", "model.safetensors"} <= names
