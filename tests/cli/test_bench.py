"""``kfconvert bench``: what is timed, of models by name and of artifacts, and what is told of the numbers."""

import json

import pytest
import torch
from test_cli import leftovers, one_error, workplace  # noqa: F401  (a fixture)

from kfconvert.cli import bench as benchmarks
from kfconvert.cli import command as cli
from kfconvert.inputs import ExampleCall, InputError, resized

pytestmark = pytest.mark.usefixtures("workplace")

ON_CPU = ("--device", "cpu", "--no-compile")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(benchmarks, "SECONDS", 0.02)


def bench(capsys, *args, code=0):
    """What is told of each model and batch size."""
    assert cli.main(["bench", *args, "--device", "cpu", "--json"]) == code
    return json.loads(capsys.readouterr().out)["benchmarks"]


@pytest.fixture
def artifact(capsys):
    options = ["--device", "cpu", "--select", "all", "--save-path", "out"]
    assert cli.main(["convert", "cli_models:net", *options]) == 0
    capsys.readouterr()
    return "out/cli_models--net"


def test_one_table_in_80_columns(capsys, monkeypatch, workplace):  # noqa: F811
    def compile(model, mode):
        raise RuntimeError("there is no C++ compiler")

    monkeypatch.setattr(torch, "compile", compile)
    assert cli.main(["bench", "cli_models:net", "cli_models:other", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("  ")]
    net, other = rows[1:4], rows[4:]
    assert max(map(len, lines)) <= 80 and "CPU" in lines[0] and "x eager (95 %)" in rows[0]
    for eager, left_out, converted in (net, other):
        assert eager.split()[0] == "eager" and "(" in eager and eager.endswith("KiB")
        assert left_out.split() == ["torch.compile", "left", "out"]
        assert "  kfconvert, " in converted and converted.endswith(")")
    told = " ".join(lines)
    assert "cli_models:net, batch 2: torch.compile was not timed: RuntimeError: there is no C++ compiler" in told
    assert leftovers(workplace) == []


def test_all_ways_at_all_batch_sizes(capsys, monkeypatch):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: modes.append(mode) or model)
    own, small, large = bench(capsys, "cli_models:net") + bench(capsys, "--batch-size", "1", "3", "cli_models:net")
    sizes = [(each["batch_size"], each["inputs"]) for each in (own, small, large)]
    assert sizes == [(rows, f"float32[{rows}, 3, 8, 8]") for rows in (2, 1, 3)] and modes == ["default"] * 3
    for each in (own, small, large):
        eager, compiled, converted = each["candidates"]
        assert [eager["name"], compiled["name"], converted["name"]] == ["eager", "torch.compile", "kfconvert"]
        assert list(each["timings"]["timings"]) == ["eager", "torch.compile", "kfconvert"]
        assert converted["details"]["sites"] <= 2 and converted["error"] < 1e-5 and converted["peak_bytes"] > 0
        speedup = each["timings"]["speedups"]["kfconvert"]
        assert speedup["low"] <= speedup["ratio"] <= speedup["high"] and each["speedup_over_compile"]["ratio"] > 0
        assert each["environment"]["threads"] == torch.get_num_threads() and each["error"] is None
    (shaped,) = bench(capsys, "cli_models:net", "--input-shape", "7,3,9,9", "--batch-size=4", "--no-compile")
    assert shaped["inputs"] == "float32[4, 3, 9, 9]" and shaped["speedup_over_compile"] is None


def test_an_artifact_is_timed_as_it_is(capsys, artifact):
    (as_made,) = bench(capsys, artifact, "--trust-source", "--no-compile", "--dtype", "float32")
    assert as_made["inputs"] == "x=float32[2, 3, 8, 8]" and as_made["notes"] == []
    assert as_made["candidates"][-1]["details"] == {"sites": 2}
    (in_folder,) = bench(capsys, "out", "--trust-source", "--no-compile", "--batch-size", "5")
    assert in_folder["name"] == artifact and in_folder["inputs"] == "x=float32[5, 3, 8, 8]"
    (missed,) = bench(capsys, artifact, "--trust-source", "--no-compile", "--input-shape", "2,3,9,9")
    (note,) = missed["notes"]
    assert note.startswith("the converted model runs its original forward: argument 0 has size 9")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ([], ["architecture runs cli_models:net", "(here: --trust-source)"]),
        (["--trust-source", "--dtype", "float16"], ["out/cli_models--net is in float32", "--dtype is for models by"]),
        (["--trust-source", "--seq-len", "3"], ["have no sequence length that can be changed"]),
    ],
)
def test_what_an_artifact_does_not_allow_is_one_line(capsys, artifact, options, parts):
    assert cli.main(["bench", artifact, *options, *ON_CPU]) == 2
    assert one_error(capsys, "out/cli_models--net", *parts) == ""


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ([], ["MODEL|ARTIFACT"]),
        (["resnet5O"], ["unknown model 'resnet5O'", "resnet50"]),
        (["cli_models:net", "--batch-size", "0"], ["--batch-size", "'0' is not a size"]),
        (["cli_models:net", "--batch-size", "1", "many"], ["unknown model 'many'"]),
        (["cli_models:net", "--batch-size"], ["'--batch-size'", "'--device' is not a size"]),
        (["cli_models:net", "--device", "cuda:99"], ["no such device"]),
        (["cli_models:exits"], ["cli_models:exits failed: SystemExit: 3"]),
        (["cli_models:picky"], ["cli_models:picky: Net does not accept float32[2, 5, 8, 8]"]),
        (["./nowhere"], ["no such folder"]),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_line(capsys, workplace, args, parts):  # noqa: F811
    assert cli.main(["bench", *args, *([] if "--device" in args else ON_CPU)]) == 2
    one_error(capsys, *parts)
    assert leftovers(workplace) == []


def test_the_failure_of_one_does_not_stop_the_others(capsys):
    failed, timed = bench(capsys, "cli_models:exits", "cli_models:net", "--no-compile", code=2)
    assert "SystemExit" in failed["error"] and failed["timings"] is None
    assert timed["error"] is None and timed["timings"]["baseline"] == "eager"


def test_inputs_of_another_size():
    ids = torch.arange(6).view(2, 3)
    call = ExampleCall((ids,), {"mask": ids > 0, "flag": True})
    more = resized(call, 5, 4)
    assert torch.equal(more.args[0][:, 0], torch.tensor([0, 3, 0, 3, 0])) and more.kwargs["flag"] is True
    assert torch.equal(more.args[0][1], torch.tensor([3, 4, 5, 3])) and more.kwargs["mask"].shape == (5, 4)
    assert resized(call, 1, None).args[0].tolist() == [[0, 1, 2]] and torch.equal(ids, torch.arange(6).view(2, 3))
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    (larger,) = resized(ExampleCall((images,)), 4, None).args
    assert larger.shape == (4, 3, 8, 8) and larger.is_contiguous(memory_format=torch.channels_last)
    for other in (ExampleCall((ids, torch.ones(3, 3))), ExampleCall(([torch.ones(3, 8, 8)],)), ExampleCall((2,))):
        with pytest.raises(InputError, match="no batch size that can be changed"):
            resized(other, 4, None)
