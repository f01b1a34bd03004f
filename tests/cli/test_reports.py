"""``kfconvert report`` and ``kfconvert compare``."""

import json
import os

import pytest
import torch
from support import small_models
from support import statistics as made
from torch import nn

import kfconvert
from kfconvert.cli import command as cli


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A folder as ``--save-path`` fills it, with two models."""
    folder = tmp_path_factory.mktemp("artifacts") / "out"
    for name, activation in (("gelu", nn.GELU()), ("relu", nn.ReLU())):
        model = nn.Sequential(nn.Linear(4, 8), activation).eval()
        kfconvert.save(small_models.convert(model, example_inputs=torch.randn(2, 4)), folder / name)
    return folder


@pytest.fixture
def out(artifacts, tmp_path, monkeypatch):
    """A copy of it in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for file in artifacts.rglob("*.*"):
        target = tmp_path / "out" / file.relative_to(artifacts)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    return tmp_path / "out"


@pytest.fixture
def opened(monkeypatch):
    """The addresses that a browser was asked to show; there is one."""
    addresses = []
    monkeypatch.setattr(cli.webbrowser, "open", lambda address: addresses.append(address) or True)
    return addresses


def one_error(capsys, *parts):
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kfconvert: error: ")]
    assert len(lines) == 1 and all(part in lines[0] for part in parts), lines


def test_where_the_page_lies_is_printed(capsys, out, opened):
    assert cli.main(["report", "out/gelu"]) == 0
    assert capsys.readouterr().out == "out/gelu/report.html\n" and not opened


def test_a_missing_page_is_made_and_shown(capsys, out, opened):
    before = (out / "gelu" / "report.html").read_bytes()
    os.remove(out / "gelu" / "report.html")
    assert cli.main(["report", "out/gelu", "--open"]) == 0
    assert opened == [(out / "gelu" / "report.html").as_uri()]
    assert (out / "gelu" / "report.html").read_bytes() == before


def test_all_pages_of_a_folder(capsys, out, opened):
    assert cli.main(["report", "out/", "--json", "--open"]) == 0
    found = json.loads(capsys.readouterr().out)
    pages = [os.path.join("out", name, "report.html") for name in ("gelu", "relu")]
    assert [each["page"] for each in found["reports"]] == pages and found["errors"] == [] and len(opened) == 2


def test_an_artifact_that_is_damaged_loses_no_other_page(capsys, out):
    (out / "gelu" / "kfconvert.json").write_text("{")
    assert cli.main(["report", "out"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "out/relu/report.html\n"
    assert printed.err.count("kfconvert: error: ") == 1 and "gelu/kfconvert.json is damaged" in printed.err


def test_without_a_browser_one_line_says_so(capsys, out, monkeypatch):
    monkeypatch.setattr(cli.webbrowser, "open", lambda address: False)
    assert cli.main(["report", "out/gelu", "--open"]) == 2
    one_error(capsys, "no browser could open out/gelu/report.html")


@pytest.mark.parametrize("args", [["report", "."], ["compare", "out/gelu", "."], ["compare", ".", "out/gelu"]])
def test_a_folder_that_is_no_artifact_is_one_line(capsys, out, args):
    os.rename(out, out.parent / "deep")
    os.makedirs(out / "in")
    os.rename(out.parent / "deep", out / "in" / "out")
    assert cli.main(args) == 2
    one_error(capsys, "kfconvert.json" if args[1] == "." else "")


def test_what_differs_fits_80_columns_unless_another_width_is_asked_for(capsys, out, monkeypatch):
    assert cli.main(["compare", "out/gelu", "out/relu"]) == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines()) and "sites fused" in printed
    assert "linear_gelu" in printed and "not found" in printed
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["compare", "out/gelu", "out/relu"]) == 0
    assert all(len(line) <= 60 for line in capsys.readouterr().out.splitlines())


def test_models_of_two_folders_are_compared_by_their_names(capsys, out):
    (out.parent / "new").mkdir()
    os.rename(out / "relu", out.parent / "new" / "relu")
    assert cli.main(["compare", "out", "new"]) == 0 and "A  out" in capsys.readouterr().out  # there is one of each
    os.rename(out.parent / "new" / "relu", out / "relu")
    (out.parent / "results.json").write_text(
        json.dumps({"models": [{"name": name, "statistics": made.statistics()} for name in ("relu", "[b]\x1b[1m")]})
    )
    assert cli.main(["compare", "out", "results.json"]) == 0
    printed = capsys.readouterr().out
    assert "A  out: relu" in printed and "model: A Sequential, B LanguageModel" in printed
    assert "only in out: gelu" in printed and r"only in results.json: [b]\x1b[1m" in printed
    assert cli.main(["compare", "out", "results.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["same_model"] for each in found["comparisons"]] == [False] and found["only_first"] == ["gelu"]


def test_where_no_name_is_in_both_there_is_nothing_to_compare(capsys, out):
    os.rename(out / "gelu", out / "mish")
    (out.parent / "results.json").write_text(json.dumps({"models": [{"name": "x", "statistics": made.statistics()}]}))
    assert cli.main(["compare", "out", "results.json"]) == 2
    one_error(capsys, "no model is in both out and results.json")
