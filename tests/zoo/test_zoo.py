"""Names to models: precedence, sizes, weights and what happens where no hub can be reached."""

import importlib.util
import socket
import subprocess
import sys
import urllib.error
import warnings

import pytest
import torch
import torchvision
import transformers
from torch import nn

from kfconvert import zoo
from kfconvert.zoo import hub, huggingface, registry, torchvision_models
from kfconvert.zoo.architectures import ARCHITECTURES, built_in
from kfconvert.zoo.common import Request
from kfconvert.zoo.huggingface_inputs import example_inputs, max_positions

# Parameters of the base model, as counted in the published checkpoints.
PUBLISHED_PARAMETERS = {
    "bert-base-uncased": 109_482_240, "bert-base-cased": 108_310_272, "bert-large-uncased": 335_141_888,
    "bert-large-cased": 333_579_264, "bert-base-multilingual-cased": 177_853_440, "roberta-base": 124_645_632,
    "roberta-large": 355_359_744, "xlm-roberta-base": 278_043_648, "distilbert-base-uncased": 66_362_880,
    "distilroberta-base": 82_118_400, "albert-base-v2": 11_683_584, "google/electra-small-discriminator": 13_483_008,
    "google/electra-base-discriminator": 108_891_648, "sentence-transformers/all-MiniLM-L6-v2": 22_713_216,
    "sentence-transformers/all-mpnet-base-v2": 109_486_464, "gpt2": 124_439_808, "distilgpt2": 81_912_576,
    "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200, "facebook/opt-125m": 125_239_296,
    "facebook/bart-base": 139_420_416, "t5-small": 60_506_624, "google/vit-base-patch16-224": 86_389_248,
    "facebook/deit-base-distilled-patch16-224": 86_390_784, "facebook/dinov2-base": 86_580_480,
    "microsoft/swin-tiny-patch4-window7-224": 27_519_354, "facebook/convnext-tiny-224": 27_820_128,
    "microsoft/resnet-50": 23_508_032, "openai/clip-vit-base-patch32": 151_277_313,
}  # fmt: skip

TINY_BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 12,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """No hub, no download server, empty caches: what this machine can reach must not matter."""

    def refuse(*args, **kwargs):
        raise ConnectionError("no network in tests")

    def refuse_url(*args, **kwargs):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr(hub.huggingface_hub, "get_session", refuse)
    monkeypatch.setattr(hub.huggingface_hub, "try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr("torch.hub.urlopen", refuse_url)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch_home"))
    remembering = (hub.exists, hub._unreachable)
    for function in remembering:
        function.cache_clear()
    yield
    for function in remembering:
        function.cache_clear()


@pytest.fixture
def tiny_bert_named(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny-bert", ("BertConfig", TINY_BERT))
    return "tiny-bert"


@pytest.fixture
def tiny_folder(tmp_path):
    """A folder as ``save_pretrained`` writes it, of a fine-tuned classifier."""
    torch.manual_seed(1)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TINY_BERT, num_labels=3)).eval()
    model.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny", model


def outputs(model: nn.Module, inputs):
    with torch.no_grad():
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_built_in_architecture_has_the_published_number_of_parameters(name):
    config_class, values = ARCHITECTURES[name]
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(getattr(transformers, config_class)(**values))
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED_PARAMETERS[name]


def test_names_with_an_organisation_of_the_hub():
    assert built_in("google-bert/bert-base-uncased") == built_in("bert-base-uncased") == "bert-base-uncased"
    assert built_in("somebody/bert-base-uncased") is built_in("gpt5") is None


def test_torchvision_model_without_network_is_random_and_says_so(tmp_path):
    with pytest.warns(zoo.WeightsWarning, match="RANDOM weights .* cannot be reached"):
        model, inputs, recipe = zoo.resolve("resnet18")
    assert not model.training and inputs.shape == (1, 3, 224, 224)
    assert recipe["kind"] == "torchvision" and recipe["weights"] == "random"
    assert not [file for file in (tmp_path / "torch_home").rglob("*") if file.is_file()]


def test_random_weights_are_the_same_each_time_and_leave_the_global_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = zoo.resolve("squeezenet1_1", weights="random")
    assert torch.equal(torch.rand(3), expected)
    second = zoo.resolve("squeezenet1_1", weights="random")
    assert all(torch.equal(a, b) for a, b in zip(first.model.state_dict().values(), second.model.state_dict().values()))
    assert torch.equal(first.example_inputs, second.example_inputs)


def test_random_batch_norms_are_not_the_identity():
    bn = zoo.resolve("resnet18", weights="random").model.bn1
    assert bn.running_mean.abs().min() > 0 and bn.running_var.std() > 0.1 and bn.bias.abs().max() > 0


def test_asking_for_random_weights_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.resolve("squeezenet1_1", weights="random")


@pytest.mark.parametrize("name", ["resnet18", "tiny-bert", "timm:resnet10t"])
def test_pretrained_without_network_is_an_error(name, tiny_bert_named):
    with pytest.raises(zoo.ZooError, match="no pretrained weights.*cannot be reached"):
        zoo.resolve(name, weights="pretrained")


def test_a_slow_download_server_is_given_up(monkeypatch):
    seen = []

    def slow(*args, **kwargs):
        seen.append(socket.getdefaulttimeout())
        raise TimeoutError("timed out")

    monkeypatch.setattr("torch.hub.urlopen", slow)
    before = socket.getdefaulttimeout()
    with pytest.raises(zoo.ZooError, match="timed out"):
        zoo.resolve("resnet18", weights="pretrained")
    assert seen and seen[0] and seen[0] <= 10 and socket.getdefaulttimeout() == before


def test_unreadable_torchvision_checkpoint_in_the_cache_is_an_error(tmp_path):
    weights = torchvision_models.models.get_model_weights("resnet18").DEFAULT
    file = tmp_path / "torch_home" / "hub" / "checkpoints" / weights.url.rsplit("/", 1)[1]
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no checkpoint")
    for weights in ("pretrained", "auto"):
        with pytest.raises(zoo.ZooError, match="the checkpoint cannot be read"):
            zoo.resolve("resnet18", weights=weights)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("inception_v3", (299, 299)),
        ("vit_b_16", (224, 224)),
        ("vit_h_14", (224, 224)),
        ("efficientnet_b4", (380, 380)),
        ("swin_v2_t", (256, 256)),
        ("r3d_18", (112, 112)),
        ("s3d", (224, 224)),
        ("quantized_resnet18", None),
        ("maskrcnn_resnet50_fpn", None),
    ],
)
def test_torchvision_input_sizes(name, size):
    if size is None:
        with pytest.raises(zoo.ZooError, match="quantized|detection"):
            zoo.resolve(name, weights="random")
        return
    with torch.device("meta"):
        model = torchvision_models._random(name, torchvision_models._KEYWORDS.get(name, {}))
    assert torchvision_models._image_size(name, model) == size


@pytest.mark.parametrize("name", ["squeezenet1_1", "lraspp_mobilenet_v3_large", "timm:resnet10t", "tiny-bert"])
def test_recipe_rebuilds_the_architecture(name, tiny_bert_named):
    model, inputs, recipe = zoo.resolve(name, weights="random")
    rebuilt = zoo.rebuild(recipe).eval()
    assert type(rebuilt) is type(model)
    rebuilt.load_state_dict(model.state_dict(), strict=True)
    before, after = (
        torch.utils._pytree.tree_leaves(dict(out) if isinstance(out, dict) else out)
        for out in (outputs(model, inputs), outputs(rebuilt, inputs))
    )
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)


def test_recipe_keeps_the_tuples_of_a_configuration():
    """JSON has only lists, but code may distinguish both, so a trace of one is no trace of the other."""
    sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = transformers.BertConfig(**sizes, pair=(1, 2), nested=[(3, (4,)), {"inner": (5,), "list": [6]}])
    model = transformers.BertModel(config)
    again = zoo.rebuild(zoo.described(model)).config
    assert (again.pair, again.nested) == (config.pair, config.nested)


def test_text_inputs_avoid_padding_and_stay_in_the_vocabulary(tiny_bert_named):
    model, inputs, _ = zoo.resolve(tiny_bert_named, weights="random", batch_size=64, seq_len=12)
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (64, 12)
    assert inputs["input_ids"].min() == 1 and inputs["input_ids"].max() == 49
    assert inputs["attention_mask"].eq(1).all()
    assert outputs(model, inputs).last_hidden_state.isfinite().all()


def test_default_length_is_cut_to_the_positions_of_the_model(tiny_bert_named):
    assert zoo.resolve(tiny_bert_named, weights="random").example_inputs["input_ids"].shape == (1, 12)


def test_longer_than_the_positions_is_an_error(tiny_bert_named):
    with pytest.raises(zoo.ZooError, match="13 is longer than the 12 positions"):
        zoo.resolve(tiny_bert_named, weights="random", seq_len=13)


@pytest.mark.parametrize("sizes", [{"batch_size": 0}, {"batch_size": -1}, {"seq_len": 0}])
def test_impossible_sizes(sizes):
    with pytest.raises(zoo.ZooError, match="must be at least 1"):
        zoo.resolve("resnet18", weights="random", **sizes)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 60}
SMALL_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 60}
SMALL_TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("config", "names", "limit"),
    [
        (transformers.RobertaConfig(**SMALL, max_position_embeddings=20), ["attention_mask", "input_ids"], 18),
        (
            transformers.GPT2Config(
                n_embd=16, n_layer=1, n_head=2, vocab_size=60, n_positions=20, bos_token_id=0, eos_token_id=0
            ),
            ["attention_mask", "input_ids"],
            20,
        ),
        (transformers.T5Config(**SMALL_T5), ["attention_mask", "decoder_input_ids", "input_ids"], None),
        (transformers.ViTConfig(**SMALL_TOWER, image_size=32), ["pixel_values"], None),
        (
            transformers.CLIPConfig(
                text_config={
                    **SMALL,
                    "max_position_embeddings": 9,
                    "bos_token_id": 0,
                    "eos_token_id": 1,
                    "pad_token_id": 2,
                },
                vision_config={**SMALL_TOWER, "image_size": 32, "patch_size": 16},
                projection_dim=8,
            ),
            ["attention_mask", "input_ids", "pixel_values"],
            9,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, transformers.PreTrainedConfig) else None,
)
def test_inputs_of_each_kind_of_model_are_accepted_up_to_its_limit(config, names, limit):
    model = transformers.AutoModel.from_config(config).eval()
    inputs = example_inputs(model, Request(batch_size=2, seq_len=limit))
    assert sorted(inputs) == names
    outputs(model, inputs)
    if "input_ids" in names:
        assert max_positions(model) == limit


def test_decoder_example_has_no_cache(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny-gpt2", ("GPT2Config", {"n_embd": 16, "n_layer": 1, "n_head": 2}))
    model, inputs, _ = zoo.resolve("tiny-gpt2", weights="random", seq_len=4)
    assert outputs(model, inputs).past_key_values is None


def test_local_folder_keeps_weights_and_head(tiny_folder):
    folder, original = tiny_folder
    model, inputs, recipe = zoo.resolve(str(folder))
    assert type(model) is transformers.BertForSequenceClassification and recipe["weights"] == "pretrained"
    torch.testing.assert_close(outputs(model, inputs).logits, outputs(original, inputs).logits)
    assert recipe["kind"] == "folder" and type(zoo.rebuild(recipe)) is type(model)


def test_local_folder_without_weights(tiny_folder):
    folder, _ = tiny_folder
    (folder / "model.safetensors").unlink()
    with pytest.warns(zoo.WeightsWarning, match="the folder has none of"):
        assert zoo.resolve(str(folder)).recipe["weights"] == "random"
    with pytest.raises(zoo.ZooError, match="no pretrained weights"):
        zoo.resolve(str(folder), weights="pretrained")


def test_damaged_checkpoint_is_an_error_even_with_auto(tiny_folder):
    folder, _ = tiny_folder
    (folder / "model.safetensors").write_bytes(b"no checkpoint")
    with pytest.raises(zoo.ZooError, match="the checkpoint cannot be read"):
        zoo.resolve(str(folder))


def test_checkpoint_that_lacks_tensors_is_told(tiny_folder):
    from safetensors.torch import load_file, save_file

    folder, _ = tiny_folder
    tensors = load_file(folder / "model.safetensors")
    del tensors["classifier.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(zoo.WeightsWarning, match="lacks 1 .* RANDOM: classifier.weight"):
        zoo.resolve(str(folder))


@pytest.mark.parametrize("content", ["{", '{"model_type": "no-such-type"}'])
def test_damaged_config_is_an_error(tiny_folder, content):
    folder, _ = tiny_folder
    (folder / "config.json").write_text(content)
    with pytest.raises(zoo.ZooError, match="config.json cannot be read"):
        zoo.resolve(str(folder))


def test_folder_that_holds_no_model(tmp_path):
    with pytest.raises(zoo.ZooError, match="no config.json"):
        zoo.resolve(str(tmp_path))
    with pytest.raises(zoo.ZooError, match="no such folder"):
        zoo.resolve(str(tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    with pytest.raises(zoo.ZooError, match="file is a file, not a folder$"):
        zoo.resolve(str(tmp_path / "file"))


def test_callable_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_zoo_models.py").write_text(
        "import torch\n"
        "def pair():\n    return torch.nn.Linear(4, 2), torch.randn(3, 4)\n"
        "def alone():\n    return torch.nn.Linear(4, 2)\n"
        "def wrong():\n    return 5\n"
        "def broken():\n    raise OSError('weights\\nare gone')\n"
        "def exits():\n    raise SystemExit(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    model, inputs, recipe = zoo.resolve("my_zoo_models:pair", dtype=torch.float64)
    assert inputs.dtype == torch.float64 and outputs(model, inputs).shape == (3, 2)
    with pytest.raises(zoo.ZooError, match="trust_source"):
        zoo.rebuild(recipe)
    assert isinstance(zoo.rebuild(recipe, trust_source=True), nn.Linear)
    for name, message in (
        ("alone", "must return .model, example_inputs."),
        ("wrong", "returned int"),
        ("broken", "OSError: weights$"),
        ("absent", "AttributeError"),
        ("exits", "SystemExit: 3$"),
    ):
        with pytest.raises(zoo.ZooError, match=message):
            zoo.resolve(f"my_zoo_models:{name}")
    with pytest.raises(zoo.ZooError, match="ModuleNotFoundError"):
        zoo.resolve("no_such_module:make")


def test_a_name_that_two_libraries_have_is_torchvisions_and_a_prefix_decides():
    assert zoo.resolve("resnet18", weights="random").recipe["kind"] == "torchvision"
    assert zoo.resolve("timm:resnet18", weights="random").recipe["kind"] == "timm"
    assert zoo.resolve("resnet10t", weights="random").recipe["kind"] == "timm"
    with pytest.raises(zoo.ZooError, match="torchvision has no model"):
        zoo.resolve("torchvision:resnet10t")


def test_without_timm(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "timm" else find_spec(name))
    registry._sources.cache_clear()
    with pytest.raises(zoo.ZooError, match="pip install timm"):
        zoo.resolve("timm:resnet18")
    assert zoo.list_models()["timm"] == []
    registry._sources.cache_clear()


def test_unknown_name_gets_the_nearest():
    with pytest.raises(zoo.ZooError, match="unknown model 'resnet5O'.*resnet50.*cannot be reached"):
        zoo.resolve("resnet5O")
    with pytest.raises(zoo.ZooError, match="unknown model 'bert-base-uncase'.*bert-base-uncased"):
        zoo.resolve("bert-base-uncase", weights="random")


def test_name_that_a_reachable_hub_does_not_have(monkeypatch):
    monkeypatch.setattr(hub, "exists", lambda name, file: False)
    with pytest.raises(zoo.ZooError, match="hub has no model 'some/thing'"):
        zoo.resolve("some/thing")


def test_cached_checkpoint_is_taken_without_asking_the_hub(monkeypatch, tiny_folder):
    folder, _ = tiny_folder
    monkeypatch.setattr(hub, "cached", lambda name, file: True)
    load = huggingface._from_pretrained
    monkeypatch.setattr(
        huggingface, "_read_config", lambda name, in_cache: transformers.AutoConfig.from_pretrained(folder)
    )
    monkeypatch.setattr(
        huggingface,
        "_from_pretrained",
        lambda name, config, model_class, local: load(str(folder), config, model_class, local),
    )
    model, _, recipe = zoo.resolve("some/thing", weights="pretrained")
    assert recipe["weights"] == "pretrained" and type(model) is transformers.BertModel


def test_rebuild_takes_only_model_classes_of_transformers(tiny_bert_named):
    recipe = zoo.resolve(tiny_bert_named, weights="random").recipe
    with pytest.raises(zoo.ZooError, match="no model class"):
        zoo.rebuild({**recipe, "class": "AutoTokenizer"})
    with pytest.raises(zoo.ZooError, match="unknown kind"):
        zoo.rebuild({"kind": "pickle"})
    with pytest.raises(zoo.ZooError, match="lacks 'name'"):
        zoo.rebuild({"kind": "torchvision"})


def _names_in(module):
    return torchvision.models.list_models(module=getattr(torchvision.models, module))


def test_names_read_from_the_sources_are_those_of_the_libraries():
    timm = pytest.importorskip("timm")
    read = registry.names()
    listed = zoo.list_models()
    assert read == {*listed["torchvision"], *listed["timm"], *listed["transformers"]}
    others = {name for module in ("detection", "quantization") for name in _names_in(module)}
    assert listed["torchvision"] == sorted(set(torchvision.models.list_models()) - others)
    assert listed["timm"] == sorted(timm.list_models())
    assert all(registry.may_have("torchvision", name) for name in torchvision.models.list_models())
    renamed = ("vit_tiny_patch16_224_in21k", "resnet50.a1_in1k")  # an old name, and one with a tag
    assert all(timm.is_model(name) and registry.may_have("timm", name) for name in renamed)
    assert not registry.may_have("timm", "resnet5O") and not registry.may_have("timm", "")
    assert not registry.may_have("no_such_library", "resnet50") and not registry.installed("no_such_library")


def test_a_word_of_a_library_that_is_no_model_is_unknown_all_the_same():
    with pytest.raises(zoo.ZooError, match="unknown model 'Bottleneck'"):
        zoo.resolve("Bottleneck")


@pytest.mark.parametrize("name", ["resnet18", "timm:resnet10t", "transformers:gpt2", "gpt2", "pkg.mod:make"])
def test_check_passes_what_may_be_a_model(name):
    zoo.check(name)


@pytest.mark.parametrize(
    "name", ["", "./nowhere", "torchvision:resnet10t", "timm:no_such_net", "transformers:some/thing"]
)
def test_check_refuses_what_is_none(name):
    with pytest.raises(zoo.ZooError):
        zoo.check(name)


def test_no_library_is_imported_to_list_models():
    code = "import sys\nfrom kfconvert import zoo\nassert zoo.list_models()['torchvision']\n"
    code += "sys.exit(bool({'torch', 'torchvision', 'timm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
