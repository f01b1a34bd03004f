"""The report: what a user reads in ten seconds must be there, and honest."""

import io
import json
import math

import pytest
from rich.console import Console
from support import statistics as made

from kfconvert.json_values import json_ready
from kfconvert.report import comparison, page
from kfconvert.report import table as report


@pytest.fixture
def stats():
    """conversion_stats of an imaginary model: two patterns, one of them partly rejected, faster and accurate."""
    slower = "not faster: kernel takes {} us, the original 10.2 us"
    sites = [
        *(made.site("layer", "conv_bn_relu") for _ in range(3)),
        made.site("layer", "linear"),
        made.site("layer", "linear", reason=slower.format(11.5)),
        made.site("head", "linear", reason=slower.format(99.9)),
        made.site("layer", "linear", reason="error 1e-3 [a reason in brackets]"),
    ]
    changed = {"model": "Net", "inputs": "float32[1, 3, 8, 8]", "sites": sites, "total_found": 7, "total_replaced": 4}
    regions = [{"name": "", "captured": True, "reason": None}]
    timings = made.timings(3.0, 2.0)
    return made.statistics() | changed | {"regions": regions, "timings": timings, "near_misses": []}


def shown(name, stats, **kwargs):
    stream = io.StringIO()
    Console(file=stream, width=140).print(report.render(name, stats, **kwargs))
    return " ".join(stream.getvalue().split())


def set_speed(stats, ratio, measurable):
    spread = 0.01 if measurable else 0.5
    stats["timings"]["speedups"]["converted"].update(
        ratio=ratio, low=ratio - spread, high=ratio + spread, measurable=measurable
    )


def test_one_look_tells_it_all(stats):
    text = shown("resnet", stats, weights="random", saved="out/resnet")
    for fact in (
        "resnet Net float32[1, 3, 8, 8] a CPU, float32",
        "4 of 7 sites fused",
        "conv_bn_relu 3 3",
        "linear 4 1 3",
        "not faster: kernel takes 11.5 us, the original 10.2 us (and 1 more)",
        "error 1e-3 [a reason in brackets]",
        "pass | error against the float64 run of the original: original 1.8e-07, converted 2.6e-07, ratio 1.44",
        "original 3.00 ms (2.85 to 3.15) -> converted 2.00 ms (1.90 to 2.10) | 1.50 x faster "
        "(95 % between 1.47 and 1.53)",
        "tuned for int64[32, 64], weight 0.2: original 40.0 ms",
        "memory weights 3.0 MiB, derived 1.0 MiB (33 %)",
        "weights random",
        "took 2.1 s",
        "saved in out/resnet",
    ):
        assert fact in text, fact
    assert "linear_gelu" not in text and "compiled kernels" not in text and "left out" not in text


def test_fusions_are_sorted_and_their_reasons_grouped(stats):
    first, second = report.fusions(stats["sites"])
    assert (first["pattern"], first["applied"], first["reasons"]) == ("conv_bn_relu", 3, {})
    assert second == {
        "pattern": "linear",
        "found": 4,
        "applied": 1,
        "rejected": 3,
        "reasons": {
            "not faster: kernel takes 11.5 us, the original 10.2 us": ["layer", "head"],
            "error 1e-3 [a reason in brackets]": ["layer"],
        },
    }
    stats["sites"] = [made.site("layer", "linear", reason=reason) for reason in "abcde"]
    assert "a b c 2 more reasons" in shown("net", stats)


@pytest.mark.parametrize(
    ("ratio", "measurable", "said"),
    [
        (0.5, True, "2.00 x SLOWER (speed-up 0.50, 95 % between 0.49 and 0.51)"),
        (0.98, False, "no measurable difference"),
        (1.3, False, "no measurable difference"),
    ],
)
def test_slower_is_called_slower_and_noise_is_no_speed_up(stats, ratio, measurable, said):
    set_speed(stats, ratio, measurable)
    assert said in shown("net", stats) and "faster (" not in report.speed_line(stats)


def test_accuracy_that_failed_or_was_not_checked(stats):
    stats["accuracy"].update(passed=False, reason="output has error 1.0e-01")
    assert "FAIL: output has error 1.0e-01" in shown("net", stats)
    stats["accuracy"]["optimized_error"] = made.error("", None)
    assert "converted not finite" in report.accuracy_line(stats)
    text = shown("net", stats | {"accuracy": None, "timings": None})
    assert "accuracy not checked" in text and "speed not measured" in text


def test_nothing_fused_says_what_stood_in_the_way():
    miss = {"pattern": "linear_relu", "reason": "has two users"}
    stats = made.nothing_found() | {"near_misses": [miss | {"module": f"layer{i}"} for i in range(7)]}
    stats["environment"]["dtype"] = "None"  # a model without parameters
    text = shown("net", stats | {"accuracy": made.statistics()["accuracy"]})
    assert "Nothing was fused, so the original is returned: none of its calls starts a pattern." in text
    assert "linear_relu at layer0: has two users" in text and "and 2 more" in text and "layer6" not in text
    assert "a CPU 0 of 0 sites fused" in text and "None" not in text
    assert "accuracy nothing was replaced, so nothing was compared" in text and "pass" not in text


def test_each_reason_for_not_capturing_is_given_once(stats):
    for name, reason in (("call a", "a [loop]"), ("call b", "a [loop]"), ("call c", "a branch")):
        stats["regions"].append({"name": name, "captured": False, "reason": reason})
    assert "not captured call a; call b: a [loop] not captured call c: a branch" in shown("net", stats)
    stats.update(total_replaced=0, nothing_fused="it could not be captured: a [loop]")
    assert shown("net", stats).count("a [loop]") == 1


def test_json_ready_is_strict_json():
    value = {"a": math.nan, 1: (math.inf, 2.5, None, True), "s": {"x"}, "t": object}
    parsed = json.loads(json.dumps(json_ready(value), allow_nan=False))
    assert parsed["a"] is None and parsed["1"] == [None, 2.5, None, True] and parsed["s"] == ["x"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"parts_left_out": 12}, "left out 12 modules: the search for parts ran out of time"),
        ({"not_written": ["last_map", "seen"]}, "not written last_map, seen: the original forward sets these"),
        ({"layout": "channels_last"}, "layout channels-last: the converted model uses this memory format"),
        ({"environment": {"extension": False}}, "without the compiled kernels: see kfconvert doctor"),
    ],
)
def test_what_is_rare_is_told_where_it_is_so(stats, changed, said):
    assert said not in shown("net", stats) and said in shown("net", stats | changed)


def test_the_layout_of_images_is_that_of_the_converted_model(stats):
    assert "layout" not in shown("net", stats | {"layout": "channels_last", "total_replaced": 0})
    first, second = (stats | {"layout": each, "sites": []} for each in ("contiguous", "channels_last"))
    assert comparison(first, second)["conditions"]["layout"] == ["contiguous", "channels_last"]
    assert "converted to channels-last" in page(second) and "channels-last" not in page(first)


def test_what_became_of_cuda_graphs_is_told():
    graphs = {"enabled": True, "recordings": 1, "bytes": 36 * 2**20, "replayed": 0, "launched": 0, "refused": {}}
    assert report.graphs_line({}) == ""
    assert report.graphs_line({"cuda_graphs": graphs}) == "calls are replayed; 36 MiB for the first recording"
    slower = {"cuda_graphs": graphs, "timings": {"timings": {"with CUDA graphs": {}}}}
    assert "slower" in report.graphs_line(slower)
    refused = {"cuda_graphs": graphs | {"recordings": 0, "refused": {"an output is in host memory": 2}}}
    assert report.graphs_line(refused) == "not recorded: an output is in host memory"


def test_that_generate_was_not_timed_is_told_where_it_was_asked_for():
    nothing = {"generation": None, "total_replaced": 0, "config": {"new_tokens": 8}}
    assert report.generation_line(nothing) == "not timed because nothing was fused"
    assert report.generation_line(nothing | {"config": {"new_tokens": None}}) == ""
    assert report.generation_line(nothing | {"total_replaced": 3}) == ""  # a model that does not generate
