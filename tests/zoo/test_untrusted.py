"""Artifacts from an unknown hand: without trust in their source, loading one runs nothing and reaches nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from kfconvert import zoo
from kfconvert.artifact.record import sealed
from kfconvert.zoo import untrusted
from kfconvert.zoo.architectures import ARCHITECTURES
from kfconvert.zoo.untrusted import config_of

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


def transformers_recipe(class_name: str, **config) -> dict:
    config_class = getattr(transformers, class_name).config_class
    return {"kind": "transformers", "class": class_name, "config": {"model_type": config_class.model_type, **config}}


def torchvision_recipe(name: str, **keywords) -> dict:
    return {"kind": "torchvision", "name": name, "keywords": keywords}


def bert(**config) -> dict:
    return transformers_recipe("BertModel", **{**TINY, **config})


HOSTILE = {
    "detection": torchvision_recipe("fasterrcnn_resnet50_fpn"),
    "quantized": torchvision_recipe("quantized_resnet18"),
    "weights": torchvision_recipe("resnet18", weights="DEFAULT"),
    "pretrained": torchvision_recipe("resnet18", pretrained=True),
    "backbone": torchvision_recipe("deeplabv3_resnet50", weights_backbone="DEFAULT"),
    "layer": torchvision_recipe("resnet18", norm_layer="os.system"),
    "timm folder": {"kind": "timm", "name": "local-dir:SECRET"},
    "timm hub": {"kind": "timm", "name": "hf-hub:timm/resnet18.a1_in1k"},
    "timm keywords": {"kind": "timm", "name": "resnet10t.no_such_tag", "keywords": {"checkpoint_path": "SECRET/a"}},
    "callable": {"kind": "callable", "name": "evil:make"},
    "folder": {"kind": "folder", "path": "SECRET", "class": "AutoModel", "config": {"model_type": "bert"}},
    "attention": bert(attn_implementation="evil/kernel"),
    "attention, internal": bert(_attn_implementation="evil/kernel"),
    "attention, inside": bert(_attn_implementation_internal="evil/kernel"),
    "attention of parts": transformers_recipe("CLIPModel", text_config={**TINY, "attn_implementation": "evil/kernel"}),
    "experts": transformers_recipe("MixtralModel", **TINY, experts_implementation="evil/kernel"),
    "code": bert(auto_map={"AutoModel": "evil--evil.Model"}, trust_remote_code=True),
    "code of parts": transformers_recipe(
        "LlavaModel", text_config={"model_type": "bert", "auto_map": {"AutoModel": "evil--evil.Model"}, **TINY}
    ),
    "quantization": bert(quantization_config={"quant_method": "gptq", "bits": 4, "dataset": "SECRET/a"}),
    "text in a tuple": {**bert(weights_file=["SECRET/a"]), "tuples": [["config", "weights_file"]]},
    "no such tuple": {**bert(), "tuples": [["config", "hidden_size"]]},
    "the whole as a tuple": {**bert(), "tuples": [[]]},
    "timm backbone": transformers_recipe("TimmBackbone", backbone="local-dir:SECRET"),
    "timm wrapper": transformers_recipe("TimmWrapperModel", architecture="local-dir:SECRET"),
    "timm arguments": transformers_recipe(
        "TimmWrapperModel", architecture="resnet10t", model_args={"checkpoint_path": "SECRET/a"}
    ),
    "timm overlay": transformers_recipe(
        "TimmWrapperModel",
        architecture="resnet10t",
        model_args={"pretrained": True, "pretrained_cfg": {"file": "SECRET/a"}},
    ),
    "backbone of the hub": transformers_recipe("DPTModel", backbone="evil/backbone", use_pretrained_backbone=True),
    "backbone in parts": transformers_recipe(
        "DetrModel", backbone_config={"model_type": "timm_backbone", "backbone": "hf-hub:evil/backbone"}
    ),
    "a folder of indices": bert(index_path="SECRET", passages_path="SECRET"),
    "a method": bert(to_dict="x"),
    "a dtype": bert(dtype="load"),
    "no class of models": {"kind": "transformers", "class": "AutoTokenizer", "config": {"model_type": "bert"}},
    "another config": {"kind": "transformers", "class": "BertModel", "config": {"model_type": "gpt2"}},
    "a class of no config": {"kind": "transformers", "class": "PreTrainedModel", "config": {"model_type": "bert"}},
    "wrong types": {"kind": "transformers", "class": ["BertModel"], "config": 5},
    "wrong kind": {"kind": {}},
    "wrong name": {"kind": "timm", "name": 5},
    "wrong keywords": {"kind": "torchvision", "name": "vit_b_16", "keywords": {"image_size": 10**9}},
    "another size": bert(hidden_size=32),
    "negative": bert(hidden_size=-16),
    "fractions": bert(hidden_size=0.5),
    "texts": bert(hidden_size="16"),
    "no dict": bert(id2label=[1]),
}

# Every load of a folder named in the arguments, in a process in which nothing but packages and the artifacts may be
# read and no socket opened. What was tried all the same is printed at the end.
LOADING = """
import json, os, sys, sysconfig
import timm, torch, torchvision, transformers
import kfconvert
from kfconvert import artifact, zoo
from kfconvert.zoo import huggingface, timm_models, torchvision_models
here = os.path.realpath(sys.argv[1])
readable = [os.path.realpath(path) for path in (*sys.path, sysconfig.get_path("stdlib"), here) if path]
readable += ["/dev/null", "/proc", "/sys"]
SOCKETS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "socket.sendto")
CODE = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class", "ctypes.dlopen")
tried = []

def watch(event, arguments):
    if event in SOCKETS or event in CODE:
        tried.append((event, str(arguments)))
        raise PermissionError(f"forbidden: {event}")
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        secret = os.path.join(here, "secret")
        if path.startswith(secret) or not any(path == each or path.startswith(each + os.sep) for each in readable):
            tried.append((event, path))
            raise PermissionError(f"forbidden: {path}")

sys.addaudithook(watch)
results = {}
for name in json.loads(sys.argv[2]):
    del tried[:]
    try:
        kfconvert.load(os.path.join(here, name))
        error = "loaded"
    except artifact.ArtifactError as caught:
        error = f"refused: {caught}"
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    results[name] = [error, list(tried)]
print(json.dumps(results))
"""


def write_artifact(folder, recipe) -> None:
    """An artifact with checksums that fit, which any hand can write."""
    folder.mkdir(parents=True)
    record = {"format": 4, "model": "a.B", "device": "cpu", "dtype": None, "recipe": recipe, "calls": [], "parts": []}
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "kfconvert.json").write_text(sealed(record | {"statistics": {}, "state_metadata": {}}, folder))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What became of each hostile artifact, and what it tried: one process for all, for the time that imports take."""
    folder = tmp_path_factory.mktemp("hostile")
    secret = folder / "secret"
    secret.mkdir()
    (secret / "config.json").write_text(json.dumps({"architecture": "resnet10t"}))
    (folder / "evil.py").write_text("raise SystemExit('the code of an artifact was run')\n")
    for name, recipe in HOSTILE.items():
        write_artifact(folder / name, json.loads(json.dumps(recipe).replace("SECRET", str(secret))))
    finished = subprocess.run(
        [sys.executable, "-c", LOADING, str(folder), json.dumps(list(HOSTILE))],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_DISABLE_TELEMETRY": "1"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_refused_in_one_line_and_reaches_nothing(loaded, name):
    result, tried = loaded[name]
    assert tried == []
    assert result.startswith("refused: ") and "\n" not in result, result


@pytest.mark.parametrize("name", [*ARCHITECTURES, "a classifier"])
def test_the_configuration_of_an_honest_recipe_comes_back_whole(name):
    if name == "a classifier":
        # As checkpoints of the hub carry them: labels of any wording, and attributes that the class no longer has.
        config = transformers.BertConfig(**TINY, id2label={0: "a/b", 1: "weights: yes"}, dtype="bfloat16")
        config.position_embedding_type, config.gradient_checkpointing, config.n_ctx = "absolute", False, 1024
    else:
        config_class, values = ARCHITECTURES[name]
        config = getattr(transformers, config_class)(**values)
    values = json.loads(config.to_json_string(use_diff=False))
    again = config_of(type(config), values)
    assert json.loads(again.to_json_string(use_diff=False)) == values


def test_what_a_recipe_may_not_choose_it_may_with_trust():
    recipe = bert(attn_implementation="eager")
    with pytest.raises(zoo.ZooError, match="attn_implementation of its BertConfig: pass model=, or trust_source=True"):
        zoo.rebuild(recipe)
    assert zoo.rebuild(recipe, trust_source=True).config._attn_implementation == "eager"


def test_kernels_of_a_hub_are_not_fetched(monkeypatch):
    """Some classes fetch theirs when they are made, where the package for it is installed, within others too."""
    yoso = transformers_recipe("YosoModel", **TINY)
    within = transformers_recipe("LlavaModel", text_config=yoso["config"])
    monkeypatch.setattr(untrusted, "is_kernels_available", lambda: True)
    for recipe in (yoso, within):
        with pytest.raises(zoo.ZooError, match="the kernels of its YosoConfig"):
            zoo.rebuild(recipe)
    zoo.rebuild(bert())
    monkeypatch.undo()
    zoo.rebuild(yoso)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.embedding = nn.Linear(3, 4), nn.Embedding(5, 6)
        self.features = torch.empty(8).normal_()
        self.seeded = nn.Parameter(torch.empty(8))
        nn.init.normal_(self.seeded, generator=torch.Generator().manual_seed(3))


def test_only_parameters_are_left_as_the_memory_is():
    torch.manual_seed(0)
    features = torch.empty(8).normal_()
    torch.manual_seed(0)
    with untrusted.Undrawn():
        made = Drawing()
    assert torch.equal(made.features, features)
    assert torch.equal(made.seeded, Drawing().seeded)
