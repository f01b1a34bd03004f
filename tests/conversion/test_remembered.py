"""Times of candidates that are kept between conversions, and between processes."""

import dataclasses
import json
import warnings

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter
from kfconvert.conversion import pipeline, remembered, selector, timing, trials
from kfconvert.conversion.remembered import Remembered
from kfconvert.profiling import Comparison

CPU = torch.device("cpu")
CANDIDATES = ("original", "kernel", "library")
TIMES = {"original": 10.0, "kernel": 5.0}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("KFCONVERT_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def timed(monkeypatch):
    """The names of the candidates of each comparison within a selection; whole models take the same."""
    compared, compare = [], selector.compare_timings
    equal = lambda candidates, *args, **kwargs: Comparison({name: [1.0] * 9 for name in candidates})  # noqa: E731
    monkeypatch.setattr(timing, "compare_timings", equal)

    def watched(candidates, *args, **kwargs):
        compared.append(list(candidates))
        return compare(candidates, *args, **kwargs)

    monkeypatch.setattr(selector, "compare_timings", watched)
    return compared


def network(width=8):
    layers = nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 36, 8)).eval()


def converted(model=None):
    converter = ModelConverter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a busy machine a model this small may not come out faster
        converter.convert_model(model or network(), input_shape=(2, 3, 8, 8))
    return converter.conversion_stats


def written(what="a site", times=TIMES):
    store = Remembered(CPU)
    store.note(what, CANDIDATES, times)
    store.save()


def known(what="a site", candidates=CANDIDATES):
    return Remembered(CPU).times(what, candidates)


def test_the_second_conversion_of_a_kind_of_model_times_no_site(folder, timed):
    first = converted()
    assert timed and first["remembered"] == 0
    timed.clear()
    torch.manual_seed(1)
    second = converted(network())
    assert not any("original" in candidates for candidates in timed) and second["remembered"] > 0
    decided = [
        [(site["strategy"], site["original_us"], site["fused_us"]) for site in s["sites"]] for s in (first, second)
    ]
    assert decided[0] == decided[1]
    converted(network(width=16))
    assert any("original" in candidates for candidates in timed)


def test_what_is_remembered_is_still_checked_for_accuracy(folder, timed, monkeypatch):
    sites = converted()["sites"]
    assert any(site["strategy"] for site in sites)
    error = trials.timed_error

    def worse(call, exact):
        found, seconds = error(call, exact)
        return (found, seconds) if getattr(call, "__name__", "") == "original" else (found + 1, seconds)

    monkeypatch.setattr(trials, "timed_error", worse)
    stats = converted()
    assert stats["total_replaced"] == 0 and all("against float64" in site["reason"] for site in stats["sites"])


def test_times_that_led_to_sites_which_were_dropped_are_not_kept(folder, monkeypatch):
    own = pipeline.validate
    monkeypatch.setattr(pipeline, "validate", lambda *args: dataclasses.replace(own(*args), dropped=True))
    converted()
    assert not folder.exists() or not list(folder.iterdir())


def test_other_threads_and_switches_are_another_environment(folder):
    written()
    assert known() == TIMES
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert known() is None
    finally:
        torch.set_num_threads(threads)
    with torch.backends.mkldnn.flags(enabled=False):
        assert known() is None
    assert known() == TIMES and known(candidates=("original", "kernel")) is None


@pytest.mark.parametrize(
    "content", ["{", '{"environment": {}, "microseconds": {}}', '{"environment": 3}', "\x00\xff", None]
)
def test_a_damaged_file_is_as_none_and_is_replaced(folder, content):
    written()
    (path,) = folder.iterdir()
    if content is None:  # what a time cannot be
        content = path.read_text().replace("10.0", '"fast"')
    path.write_text(content)
    assert known() is None
    written()
    assert known() == TIMES


@pytest.mark.parametrize("times", [{"kernel": 5.0}, {"original": 10.0}, {"original": 10.0, "gone": 1.0}])
def test_times_of_other_candidates_than_are_there_are_not_taken(folder, times):
    written(times=times)
    assert known() is None


def test_a_folder_that_cannot_be_written_is_no_obstacle(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KFCONVERT_CACHE", str(tmp_path / "file" / "kept"))
    written()
    assert known() is None


def test_nothing_is_written_where_it_is_switched_off(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert converted()["remembered"] == 0
    written()
    assert not list(tmp_path.iterdir())


def test_the_file_tells_people_what_was_timed(folder):
    converted()
    (path,) = folder.glob("timings-*.json")
    content = json.loads(path.read_text())
    assert content["environment"]["torch"] == torch.__version__
    assert any("conv_bn_relu" in what and "float32[2, 3, 8, 8]" in what for what in content["microseconds"])
    assert all(set(times) >= {"original"} for times in content["microseconds"].values())


def test_the_oldest_entries_go_first(folder, monkeypatch):
    monkeypatch.setattr(remembered, "MOST_ENTRIES", 3)
    for what in ("one", "two", "three", "one", "four"):
        written(what)
    assert [what for what in ("one", "two", "three", "four") if known(what)] == ["one", "three", "four"]
