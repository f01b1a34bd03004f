"""The command: what it prints where, its exit codes, and what it leaves behind when something goes wrong."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch

from kfconvert import load, unregister_pattern
from kfconvert.artifact import files as artifact
from kfconvert.artifact import saving
from kfconvert.cli import command as cli
from kfconvert.cli import jobs
from kfconvert.conversion import timing as conversion
from kfconvert.profiling import compare_timings
from kfconvert.zoo import hub
from kfconvert.zoo.architectures import ARCHITECTURES

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return torch.relu(self.head(torch.relu(self.bn(self.conv(x))).mean((2, 3))))

def net():
    print("libraries print where they like")
    return Net(), torch.randn(2, 3, 8, 8)

def other():
    return Net(), torch.randn(2, 3, 8, 8)

def picky():
    return Net(), torch.randn(2, 5, 8, 8)

def exits():
    raise SystemExit(3)

def interrupted():
    raise KeyboardInterrupt
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """A current folder with a module of models, no hub, and short measurements."""
    (tmp_path / "cli_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delitem(sys.modules, "cli_models", raising=False)
    monkeypatch.setattr(hub, "exists", lambda *_: (_ for _ in ()).throw(hub.HubUnreachable("no network in tests")))
    monkeypatch.setattr(
        conversion, "compare_timings", lambda calls, device, **_: compare_timings(calls, device, 0.01, 2)
    )
    return tmp_path


def leftovers(folder):
    """What a run left in the current folder, beside the module of models."""
    return sorted(set(os.listdir(folder)) - {"cli_models.py", "__pycache__"})


def one_error(capsys, *parts):
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("kfconvert: error: ")]
    assert len(lines) == 1 and "Traceback" not in err
    assert all(part in lines[0] for part in parts), lines[0]
    return out


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("google/vit-base", "google--vit-base"),
        ("pkg.mod:make", "pkg.mod--make"),
        ("../..", None),
        ("a/../../b", "a--..--..--b"),
    ],
)
def test_folder_names_stay_below_the_save_path(name, folder):
    found = jobs.folder_name(name)
    assert "/" not in found and found.strip(".") == found
    assert folder is None or found == folder


def test_convert_save_and_load(capsys, workplace):
    assert cli.main(["--models", "cli_models:net", "--save-path", "out", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "cli_models:net" in out and "conv_bn_relu" in out and "accuracy" in out and "speed" in out
    assert "where they like" not in out
    assert os.listdir("out") == ["cli_models--net"]
    model = load("out/cli_models--net", trust_source=True)
    assert model.kfconvert_info()["total_found"] >= 2


def test_json_is_all_there_is_on_stdout_and_a_failure_loses_nothing(capsys, workplace):
    names = ["no_such_module:make", "cli_models:net", "cli_models:picky"]
    code = cli.main(["--models", *names, "--json", "--save-path", "out", "--device", "cpu"])
    out, err = capsys.readouterr()
    missing, net, picky = json.loads(out)["models"]
    assert code == cli.EXIT_ERROR
    assert "ModuleNotFoundError" in missing["error"] and missing["statistics"] is None
    assert "does not accept" in picky["error"]
    assert net["error"] is None and net["statistics"]["total_found"] >= 2 and net["saved"] == "out/cli_models--net"
    assert os.listdir("out") == ["cli_models--net"]
    assert err.count("kfconvert: error:") == 2 and "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["convert"], ["--models"]),
        (["--models"], ["requires an argument"]),
        (["--models", ","], ["at least one name"]),
        (["resnet50"], ["--models resnet50"]),
        (["--models", "resnet18", "--batch-size", "0"], ["--batch-size", "0"]),
        (["--models", "gpt2", "--generate", "64"], ["--generate", "'64' is not two numbers of tokens", "64,128"]),
        (["--models", "gpt2", "--generate", "4,4", "--seq-len", "4"], ["--generate sets the prompt length"]),
        (["--models", "cli_models:net", "--generate", "4,4"], ["cli_models:net"]),
        (["--models", "resnet18", "--dtype", "int8"], ["--dtype", "int8"]),
        (["--models", "resnet18", "--device", "tpu9"], ["no such device", "tpu9"]),
        (["--models", "resnet18", "--tune-for", "1,x"], ["'1,x' is not a shape"]),
        (["--models", "resnet18", "--tune-for", "1,3:0"], ["the weight '0' is not a number above 0"]),
        (["--models", "resnet18", "--max-extra-memory", "5"], ["'5' is neither a share such as 5% nor a size"]),
        (["--models", "resnet18", "--nonsense"], ["--nonsense"]),
        (["--models", "cli_models:net", "--accuracy-threshold", "nan"], ["accuracy_threshold must be a number"]),
        (["convert", "resnet18", "--skip-existing"], ["--skip-existing needs --save-path"]),
        (["--models", "cli_models:net", "--input-shape", "2,5,8,8"], ["does not accept float32[2, 5, 8, 8]"]),
        (
            ["--models", "cli_models:net", "--exclude", "linear_rleu"],
            ["exclude: no pattern is called 'linear_rleu'; did you mean 'linear_relu'"],
        ),
        (["--models", "cli_models:net", "--modules", "hed"], ["Net has no module 'hed'; did you mean 'head'?"]),
        (["--models", "resnet5O", "--weights", "random"], ["unknown model 'resnet5O'", "resnet50"]),
        (["--models", "resnet18", "--weights", "pretrained"], ["no pretrained weights", "cannot be reached"]),
        (["--models", "./nowhere"], ["no such folder"]),
        (["--dtype", "float16", "explain", "resnet18"], ["--dtype has no effect before explain"]),
        (["explain", "resnet18", "--input-shape", "1,3,many"], ["--input-shape", "1,3,many"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_get_one_line_and_exit_code_2(capsys, workplace, monkeypatch, args, parts):
    monkeypatch.setattr("torch.hub.urlopen", lambda *_: (_ for _ in ()).throw(TimeoutError("no network in tests")))
    monkeypatch.setenv("TORCH_HOME", str(workplace / "__pycache__"))
    assert cli.main([*args, "--save-path", "out"] if args and args[0] == "--models" and len(args) > 1 else args) == 2
    assert one_error(capsys, *parts) == ""
    assert leftovers(workplace) == []


@pytest.mark.parametrize(
    "args",
    [
        ["--models", "resnet18", "--json", "--json-lines"],
        ["--models", "resnet18", "--device", "tpu9", "--json-lines"],
        ["convert", "resnet5O", "--json"],
        ["explain", "resnet5O", "--json"],
        ["bench", "resnet5O", "--json"],
        ["report", "nowhere", "--json"],
        ["compare", "nowhere", "nowhere", "--json"],
        ["lsit", "--json"],
    ],
    ids=" ".join,
)
def test_who_reads_json_gets_errors_in_json(capsys, workplace, args):
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    for results in ("models", "benchmarks"):
        (found,) = found.get(results, [found])
    (line,) = [line for line in err.splitlines() if line.startswith("kfconvert: error: ")]
    assert line == f"kfconvert: error: {found['error']}"


def test_an_error_that_nobody_foresaw_is_in_json_too(capsys, monkeypatch):
    monkeypatch.setattr("kfconvert.zoo.list_models", lambda: 1 / 0)
    assert cli.main(["list", "--json"]) == 2
    assert "ZeroDivisionError" in json.loads(capsys.readouterr().out)["error"]


def test_what_is_wanted_and_what_is_not(capsys, workplace):
    options = ["--exclude", "linear_*", "attention", "--include", "conv_*,linear_relu", "--modules", "conv", "head"]
    assert cli.main(["--models", "cli_models:net", "--json", *options, "--device", "cpu"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    reasons = {site["pattern"]: site["reason"] for site in model["statistics"]["sites"]}
    assert reasons["conv_bn_relu"] == "excluded by modules=['conv', 'head']: it covers the model itself"
    assert reasons["linear_relu"] == "excluded by exclude=['linear_*']"
    assert model["statistics"]["config"]["include"] == ["conv_*", "linear_relu"]


OWN_PATTERN = """
import kfconvert
from cli_models import *

def doubled(x):
    return x.sin() * 2

class Doubled(nn.Module):
    def forward(self, x):
        return doubled(x)

kfconvert.register_pattern(doubled, lambda x: 2 * x.sin(), torch.ones(2, 4), name="own_doubled")

def alone():
    return Doubled()
"""


def test_a_pattern_of_the_models_own_code_and_a_model_alone(capsys, workplace, monkeypatch):
    (workplace / "__pycache__").mkdir(exist_ok=True)
    (workplace / "__pycache__" / "own_code.py").write_text(OWN_PATTERN)
    monkeypatch.syspath_prepend(str(workplace / "__pycache__"))
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    arguments = ["own_code:alone", "--input-shape", "2,4", "--exclude", "own_*,own_doubled", "--device", "cpu"]
    try:
        assert cli.main(["convert", *arguments, "--json"]) == 0
        (model,) = json.loads(capsys.readouterr().out)["models"]
        (site,) = model["statistics"]["sites"]
        assert site["reason"] == "excluded by exclude=['own_*']" and model["statistics"]["inputs"] == "float32[2, 4]"
        assert cli.main(["explain", *arguments]) == 0
        assert "excluded by exclude=['own_*']" in capsys.readouterr().out
        assert cli.main(["convert", "own_code:alone", "--device", "cpu"]) == 2
        one_error(capsys, "must return (model, example_inputs)", "no input shape was given")
    finally:
        unregister_pattern("own_doubled")


def test_inputs_to_tune_for(capsys, workplace):
    shapes = ["--tune-for", "1,3,8,8", "--tune-for", "4,3,8,8:0.5"]
    assert cli.main(["--models", "cli_models:net", "--json", *shapes]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    tuned = [(each["inputs"], each["weight"]) for each in model["statistics"]["tuned_for"]]
    assert tuned == [("float32[1, 3, 8, 8]", 1.0), ("float32[4, 3, 8, 8]", 0.5)]


@pytest.fixture
def tiny_bert(monkeypatch):
    values = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    monkeypatch.setitem(ARCHITECTURES, "tiny-bert", ("BertConfig", values))


@pytest.mark.usefixtures("tiny_bert")
def test_sequence_longer_than_the_model_allows(capsys, workplace):
    assert cli.main(["--models", "tiny-bert", "--weights", "random", "--seq-len", "513", "--save-path", "out"]) == 2
    one_error(capsys, "513", "512 positions")
    assert leftovers(workplace) == []


def test_dtype_that_the_device_lacks(capsys, monkeypatch):
    def refuse(*args):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch.nn.functional, "conv2d", refuse)
    assert cli.main(["--models", "resnet18", "--dtype", "float16", "--device", "cpu"]) == 2
    one_error(capsys, "cpu cannot compute in float16", "not implemented")


@pytest.mark.usefixtures("tiny_bert")
def test_random_weights_are_said_loudly(capsys):
    options = ["--seq-len", "4", "--device", "cpu", "--effort", "fast", "--select", "all"]
    assert cli.main(["--models", "tiny-bert", *options]) == 0
    out, err = capsys.readouterr()
    assert "kfconvert: warning: tiny-bert: RANDOM weights" in err and "weights" in out and "random" in out


@pytest.mark.exhaustive
def test_generating_is_timed_on_the_command_line(capsys, workplace, monkeypatch):
    values = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "eos_token_id": 1}
    monkeypatch.setitem(ARCHITECTURES, "tiny-gpt2", ("GPT2Config", values))
    given = ["--models", "tiny-gpt2", "--weights", "random", "--device", "cpu", "--effort", "fast", "--select", "all"]
    assert cli.main([*given, "--generate", "8,5", "--save-path", "out", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["models"][0]
    assert result["statistics"]["generation"]["prompt"] == [1, 8]
    assert result["statistics"]["generation"]["new_tokens"] == 5
    loaded = artifact.load("out/tiny-gpt2")
    assert loaded.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3).shape == (1, 7)


def test_unwritable_save_path_is_found_before_the_work(capsys, workplace, monkeypatch):
    monkeypatch.setattr("kfconvert.zoo.resolve", lambda *_, **__: pytest.fail("the work began"))
    (workplace / "__pycache__").mkdir(exist_ok=True)
    (workplace / "__pycache__" / "file").touch()
    assert cli.main(["--models", "cli_models:net", "--save-path", "__pycache__/file/out"]) == 2
    one_error(capsys, "cannot create the save path __pycache__/file/out", "is a file")
    monkeypatch.setattr(
        "kfconvert.folders.tempfile.TemporaryFile",
        lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "Permission denied")),
    )
    assert cli.main(["--models", "cli_models:net", "--save-path", "out"]) == 2
    one_error(capsys, "cannot create the save path out: Permission denied")


def test_folder_that_is_no_artifact_is_not_replaced(capsys, workplace):
    (workplace / "__pycache__" / "cli_models--net").mkdir(parents=True)
    (workplace / "__pycache__" / "cli_models--net" / "thesis.txt").touch()
    assert cli.main(["--models", "cli_models:net", "--save-path", "__pycache__"]) == 2
    one_error(capsys, "not a kfconvert artifact")
    assert os.listdir("__pycache__/cli_models--net") == ["thesis.txt"]


def test_two_models_for_one_folder(capsys):
    assert cli.main(["--models", "a/b", "a:b", "--save-path", "out"]) == 2
    one_error(capsys, "a/b and a:b", "a--b")


def test_reports_in_a_pipe_have_80_columns_unless_another_width_is_asked_for(capsys, monkeypatch):
    for width, columns in ((80, "many"), (60, "60")):
        monkeypatch.setenv("COLUMNS", columns)
        assert cli.main(["--models", "cli_models:net", "--device", "cpu"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert width - 20 < max(map(len, lines)) <= width and all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("failure", "told"),
    [(KeyboardInterrupt, "interrupted"), (OSError(errno.ENOSPC, "No space left on device"), "No space left on device")],
)
def test_a_save_that_fails_leaves_nothing_and_loses_no_report(capsys, workplace, monkeypatch, failure, told):
    def cut_short(*args, **kwargs):
        raise failure

    monkeypatch.setattr(saving, "write_tensors", cut_short)
    assert cli.main(["--models", "cli_models:net", "--save-path", "deep/out", "--device", "cpu"]) == 2
    out = one_error(capsys, told)
    assert leftovers(workplace) == [] and ("accuracy" in out) == (told != "interrupted")


def test_ctrl_c_ends_all_models(capsys, workplace):
    assert cli.main(["--models", "cli_models:interrupted", "cli_models:net", "--save-path", "out"]) == 2
    assert one_error(capsys, "interrupted") == "" and leftovers(workplace) == []


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("surprise"), ["cli_models:net: unexpected KeyError at", "test_cli.py", "surprise"]),
        (SystemExit(3), ["unexpected SystemExit", "3"]),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ..."), ["out of memory on cpu"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_error_of_a_conversion_is_one_line(capsys, monkeypatch, error, told):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr("kfconvert.converter.ModelConverter.convert_model", fails)
    assert cli.main(["--models", "cli_models:net", "--device", "cpu"]) == 2
    one_error(capsys, *told)


@pytest.mark.parametrize("args", [["--list-models"], ["list"]])
def test_list_models(capsys, args):
    assert cli.main(args) == 0
    out = capsys.readouterr().out
    assert "  resnet50\n" in out and "  bert-base-uncased\n" in out and "  timm:" in out
    assert cli.main([*args, "--json"]) == 0
    assert "resnet50" in json.loads(capsys.readouterr().out)["torchvision"]


def test_the_command_alone_shows_its_help_with_examples(capsys):
    assert cli.main([]) == 0
    alone = capsys.readouterr()
    assert cli.main(["--help"]) == 0
    assert alone == capsys.readouterr() and alone.err == ""
    assert "kfconvert --models resnet50 bert-base-uncased --save-path out/" in alone.out and "completion" in alone.out


def test_convert_by_name_skips_what_is_there_and_ends_with_a_summary(capsys, workplace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    (workplace / "out" / "cli_models--net").mkdir(parents=True)
    (workplace / "out" / "cli_models--net" / "kfconvert.json").touch()
    options = ["--save-path", "out", "--skip-existing", "--device", "cpu", "--select", "all"]
    options += ["--input-shape", "3,3,9,9"]
    assert cli.main(["convert", "cli_models:net", "--models", "cli_models:other", "cli_models:exits", *options]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("cli_models:net: skipped, out/cli_models--net is there\n")
    assert "cli_models:other  Net  float32[3, 3, 9, 9]" in out
    *_, first, second, third, _ = out.splitlines()
    assert first.split() == ["cli_models:net", "skipped:", "out/cli_models--net", "is", "there"]
    assert second.split()[:4] == ["cli_models:other", "2", "of", "2"] and "pass" in second
    assert second.endswith("out/cli_models--other") and third.split()[0] == "cli_models:exits"
    assert third.endswith("failed: SystemExit: 3") and err.count("kfconvert: error: ") == 1


def test_a_line_of_json_for_each_model_and_one_at_the_end(capsys, workplace):
    options = ["--json-lines", "--device", "cpu", "--select", "all", "--accuracy-threshold", "0.25"]
    assert cli.main(["--models", "cli_models:net", "cli_models:exits", *options]) == 2
    net, exits, counts = map(json.loads, capsys.readouterr().out.splitlines())
    assert net["name"] == "cli_models:net" and net["statistics"]["config"]["accuracy_threshold"] == 0.25
    assert {site["status"] for site in net["statistics"]["sites"]} == {"applied"}
    assert exits["statistics"] is None and "SystemExit" in exits["error"]
    assert (counts["converted"], counts["failed"], counts["skipped"]) == (1, 1, 0)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(capsys, monkeypatch, shell):
    assert cli.main(["completion", shell]) == 0
    assert f"_KFCONVERT_COMPLETE={shell}_complete" in capsys.readouterr().out
    monkeypatch.setenv("_KFCONVERT_COMPLETE", f"{shell}_complete")
    for typed, completed in (
        ("kfconvert --models resnet50 --eff", "--effort"),
        ("kfconvert rep", "report"),
        ("kfconvert explain resnet5", "resnet50"),
    ):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", typed.split()[-1] if shell == "fish" else str(typed.count(" ")))
        with pytest.raises(SystemExit):
            cli.main([])
        assert completed in capsys.readouterr().out


def test_version_and_doctor(capsys):
    assert cli.main(["--version"]) == 0
    assert "kernels" in capsys.readouterr().out
    assert cli.main(["doctor"]) == 0
    assert "CPU kernels" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {"name", "ok", "detail", "advice"} == set(checks[0])


def test_the_package_is_the_command_and_its_help_does_not_wait_for_torch():
    code = (
        "import runpy, sys\nsys.argv[1:] = ['--help']\n"
        "try:\n    runpy.run_module('kfconvert', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as ended:\n    sys.exit(ended.code or 'torch' in sys.modules)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0 and "--models" in finished.stdout, finished.stderr


def test_explain(capsys, workplace):
    assert cli.main(["explain", "cli_models:net", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    first, *tree = out.splitlines()
    assert first == "Net  float32[2, 3, 8, 8]  2 of 2 sites fit"
    assert any("conv  Conv2d  conv_bn_relu: fits" in line for line in tree)
    assert any("head  Linear  linear_relu: fits" in line and line.endswith(" % of the time") for line in tree)
    assert "ms of the original's forward" in tree[0] and tree[0].endswith("% is in sites that can be fused")
    assert all(line == line.rstrip() for line in tree) and "error" not in err and "like" not in out
    assert cli.main(["explain", "cli_models:net", "--device", "cpu", "--input-shape", "4,3,9,9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["statistics"]["inputs"] == "float32[4, 3, 9, 9]" and leftovers(workplace) == []
    assert found["name"] == "cli_models:net" and found["classes"]["head"] == "Linear"
    assert found["statistics"]["total_found"] == 2 and found["statistics"]["timings"]
    shares = found["statistics"]["time_shares"]
    assert shares["modules"].keys() == found["classes"].keys() and shares["modules"][""] == 1
