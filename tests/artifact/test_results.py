"""The page of an artifact, and what several conversions have found, read back from files of any hand."""

import json
import os
import shutil

import pytest
import torch
from support import small_models
from support import statistics as made
from support.artifacts import contents, rewrite
from torch import nn

import kfconvert
from kfconvert.artifact import ArtifactError, artifacts_in, results_in, write_report
from kfconvert.artifact.checksums import checksum
from kfconvert.artifact.record import read_record


@pytest.fixture(scope="module")
def fused():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.ReLU()).eval()
    return small_models.convert(model, example_inputs=torch.randn(2, 4))


@pytest.fixture(scope="module")
def made_once(fused, tmp_path_factory):
    recipe = {"kind": "callable", "name": "mine:net", "weights": "random"}
    return kfconvert.save(fused, tmp_path_factory.mktemp("saved"), source=recipe)


@pytest.fixture
def saved(made_once, tmp_path):
    return shutil.copytree(made_once, tmp_path / "out" / "net")


def checksum_fits(folder) -> bool:
    return read_record(folder)["files"]["report.html"] == checksum(folder / "report.html")


def test_a_page_lies_beside_each_artifact_and_is_covered_by_its_checksums(saved):
    text = (saved / "report.html").read_text()
    assert "<h1>mine:net</h1>" in text and "Sequential" in text and "The weights are random" in text
    assert checksum_fits(saved)


def test_the_page_that_is_there_is_left_alone(saved):
    before = {name: os.stat(saved / name).st_mtime_ns for name in os.listdir(saved)}
    assert write_report(saved) == saved / "report.html"
    assert {name: os.stat(saved / name).st_mtime_ns for name in os.listdir(saved)} == before


def remove(file):
    file.unlink()


def of_an_older_version(file):
    file.write_text(file.read_text().replace("kfconvert 0.", "kfconvert 0.0."))


def with_a_script(file):
    file.write_text("<script>alert(1)</script>")


@pytest.mark.parametrize("change", [remove, of_an_older_version, with_a_script])
def test_a_page_that_is_missing_or_another_is_made_anew(saved, change):
    before = contents(saved)
    change(saved / "report.html")
    assert write_report(saved) == saved / "report.html"
    assert contents(saved) == before


def test_what_the_record_says_now_is_what_the_page_tells(saved):
    statistics = read_record(saved)["statistics"]
    rewrite(saved, statistics=statistics | {"model": "<b>Another</b>"}, recipe=None)
    assert "<h1>&lt;b&gt;Another&lt;/b&gt;</h1>" in write_report(saved).read_text() and checksum_fits(saved)
    with pytest.raises(ArtifactError, match="pass model="):
        kfconvert.load(saved)


def test_a_page_that_cannot_be_written_is_one_line_and_nothing_changes(saved):
    (saved / "report.html").unlink()
    (saved / "report.html").mkdir()
    names = sorted(os.listdir(saved))
    with pytest.raises(ArtifactError, match="cannot write .*report.html: Is a directory"):
        write_report(saved)
    assert sorted(os.listdir(saved)) == names


def test_artifacts_are_found_by_themselves_and_in_a_folder(saved):
    out = saved.parent
    other = shutil.copytree(saved, out / "another")
    (out / "notes").mkdir()
    (out / "file").touch()
    assert artifacts_in(saved) == [saved] and artifacts_in(out) == [other, saved]
    assert list(results_in(out)) == ["another", "net"] and list(results_in(saved)) == ["net"]
    assert results_in(saved)["net"] == read_record(saved)["statistics"]


@pytest.mark.parametrize("name", ["nowhere", "empty", "file", "a\0b"])
def test_where_there_is_no_artifact_one_line_says_so(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for read in (artifacts_in, results_in):
        with pytest.raises(ArtifactError) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value) and name.split("\0")[0] in str(caught.value)


def results(*models) -> str:
    return json.dumps({"kfconvert": "0.1.0", "models": models})


def result(name, statistics, error=None):
    return {"name": name, "error": error, "skipped": False, "saved": None, "weights": None, "statistics": statistics}


def test_what_the_command_printed_is_read(tmp_path):
    file = tmp_path / "results.json"
    file.write_text(
        results(result("a", made.statistics()), result("b", None, "no such model"), result("c", made.old()))
    )
    assert results_in(file) == {"a": made.statistics(), "c": made.old()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged"),
        ("[]", "not the output of kfconvert --json"),
        ('{"models": 5}', "not the output of kfconvert --json"),
        ('{"models": NaN}', "NaN is not a JSON number"),
        (results(), "no converted model"),
        (results(result("a", None, "failed")), "no converted model"),
        (results(result("a", made.statistics() | {"sites": [{"pattern": 1}]})), "models.0.statistics.sites"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, text, message):
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(ArtifactError, match=message) as caught:
        results_in(file)
    assert "\n" not in str(caught.value) and "results.json" in str(caught.value)
