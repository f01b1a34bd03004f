"""The report: what a user reads in ten seconds must be there, and honest."""

import io
import json
import math

import pytest
from rich.console import Console
from torch import nn

from kfconvert.converter import ModelConverter
from kfconvert.json_values import json_ready
from kfconvert.report import comparison, page
from kfconvert.report import table as report


def error(max_rel):
    return {"leaf": "", "scale": 1.0, "max_abs": max_rel, "max_rel": max_rel}


def site(pattern, status, reason=None):
    return {"pattern": pattern, "module": "layer", "status": status, "reason": reason}


@pytest.fixture
def stats():
    """conversion_stats of an imaginary model: two patterns, one of them partly rejected, faster and
    accurate."""
    return {
        "conv_bn_relu_found": 3,
        "conv_bn_relu_replaced": 3,
        "linear_found": 4,
        "linear_replaced": 1,
        "linear_gelu_found": 0,
        "linear_gelu_replaced": 0,
        "total_found": 7,
        "total_replaced": 4,
        "speedup_achieved": 1.5,
        "model": "Net",
        "inputs": "float32[1, 3, 8, 8]",
        "sites": [site("conv_bn_relu", "applied")] * 3
        + [
            site("linear", "applied"),
            site("linear", "rejected", "not faster: kernel takes 11.5 us, the original 10.2 us"),
            site("linear", "rejected", "not faster: kernel takes 99.9 us, the original 10.3 us"),
            site("linear", "rejected", "error 1e-3 [a reason in brackets]"),
        ],
        "near_misses": [],
        "regions": [{"name": "", "captured": True, "reason": None}],
        "accuracy": {
            "passed": True,
            "reason": None,
            "reference": "float64 run of the original",
            "ratio": 1.04,
            "original_error": error(2.3e-7),
            "optimized_error": error(2.4e-7),
            "accuracy_threshold": 1e-6,
        },
        "timings": {
            "baseline": "original",
            "timings": {
                "original": {"median_ms": 3.0, "q1_ms": 2.9, "q3_ms": 3.2, "rounds": 9},
                "converted": {"median_ms": 2.0, "q1_ms": 1.9, "q3_ms": 2.1, "rounds": 9},
            },
            "speedups": {
                "converted": {
                    "ratio": 1.5,
                    "q1": 1.4,
                    "q3": 1.6,
                    "low": 1.41,
                    "high": 1.59,
                    "measurable": True,
                }
            },
        },
        "seconds": {"trace": 1.0, "select": 2.04},
        "environment": {"device": "a CPU", "dtype": "float32", "extension": True},
        "reverted": None,
        "nothing_fused": None,
    }


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
        "pass | error against the float64 run of the original: original 2.3e-07, converted 2.4e-07, ratio 1.04",
        "original 3.00 ms (2.90 to 3.20) -> converted 2.00 ms (1.90 to 2.10) | 1.50 x faster "
        "(95 % between 1.41 and 1.59)",
        "weights random",
        "took 3.0 s",
        "saved in out/resnet",
    ):
        assert fact in text
    assert "linear_gelu" not in text and "compiled kernels" not in text


def test_fusions_are_sorted_and_their_reasons_grouped(stats):
    first, second = report.fusions(stats)
    assert (first["pattern"], first["applied"], first["reasons"]) == ("conv_bn_relu", 3, {})
    assert second == {
        "pattern": "linear",
        "found": 4,
        "applied": 1,
        "rejected": 3,
        "reasons": {
            "not faster: kernel takes 11.5 us, the original 10.2 us": 2,
            "error 1e-3 [a reason in brackets]": 1,
        },
    }


def test_many_reasons_are_cut(stats):
    stats["sites"] = [site("linear", "rejected", reason) for reason in ("a", "b", "c", "d", "e")]
    assert "a b c 2 more reasons" in shown("net", stats)


def test_slower_is_called_slower(stats):
    set_speed(stats, 0.5, measurable=True)
    assert "2.00 x SLOWER (speed-up 0.50, 95 % between 0.49 and 0.51)" in shown("net", stats)


@pytest.mark.parametrize("ratio", [0.98, 1.3])
def test_noise_is_no_speed_up(stats, ratio):
    set_speed(stats, ratio, measurable=False)
    text = report.speed_line(stats)
    assert "no measurable difference" in text and "faster" not in text


def test_failed_accuracy_is_loud(stats):
    stats["accuracy"].update(passed=False, reason="output has error 1.0e-01")
    assert "FAIL: output has error 1.0e-01" in shown("net", stats)
    stats["accuracy"]["optimized_error"] = error(None)
    assert "converted not finite" in report.accuracy_line(stats)


def test_nothing_measured_or_checked(stats):
    stats.update(accuracy=None, timings=None)
    text = shown("net", stats)
    assert "accuracy not checked" in text and "speed not measured" in text


def test_nothing_fused_says_what_stood_in_the_way(stats):
    stats.update(
        total_replaced=0,
        total_found=0,
        sites=[],
        linear_found=0,
        conv_bn_relu_found=0,
        nothing_fused="no site was found",
        given_back="no site was found",
        near_misses=[{"pattern": "linear_relu", "module": f"layer{i}", "reason": "has two users"} for i in range(7)],
    )
    text = shown("net", stats)
    assert "Nothing was fused, the original is given back: no site was found." in text
    assert "linear_relu at layer0: has two users" in text and "and 2 more" in text and "layer6" not in text


def test_regions_that_were_not_captured_are_named(stats):
    stats["regions"].append({"name": "decoder", "captured": False, "reason": "a loop over [tokens]"})
    assert "not captured decoder: a loop over [tokens]" in shown("net", stats)


def test_each_reason_for_not_capturing_is_given_once(stats):
    for name, reason in (("call a", "a loop"), ("call b", "a loop"), ("call c", "a branch")):
        stats["regions"].append({"name": name, "captured": False, "reason": reason})
    text = shown("net", stats)
    assert "not captured call a; call b: a loop not captured call c: a branch" in text
    stats.update(total_replaced=0, nothing_fused="it could not be captured: a loop")
    assert shown("net", stats).count("a loop") == 1


def test_model_without_parameters_and_sites(stats):
    stats.update(total_replaced=0, total_found=0, sites=[], linear_found=0, conv_bn_relu_found=0)
    stats["environment"]["dtype"] = "None"
    text = shown("net", stats)
    assert "a CPU 0 of 0 sites fused" in text and "None" not in text
    assert "accuracy nothing was replaced, so nothing was compared" in text and "pass" not in text


def test_missing_kernels_are_told(stats):
    stats["environment"]["extension"] = False
    assert "without the compiled kernels: see kfconvert doctor" in shown("net", stats)


def test_json_ready_is_strict_json():
    value = {"a": math.nan, 1: (math.inf, 2.5, None, True), "s": {"x"}, "t": object}
    parsed = json.loads(json.dumps(json_ready(value), allow_nan=False))
    assert parsed["a"] is None and parsed["1"] == [None, 2.5, None, True] and parsed["s"] == ["x"]


def test_real_statistics_of_a_model_in_which_nothing_fuses():
    model = nn.Sequential(nn.Softmax(1), nn.ELU()).eval()
    converter = ModelConverter()
    with pytest.warns(UserWarning, match="fused nothing"):
        converter.convert_model(model, input_shape=(1, 3, 8, 8))
    assert "attention at 0: its value goes to aten.elu" in shown("net", converter.conversion_stats)


def test_modules_that_there_was_no_time_for_are_counted(stats):
    assert "left out" not in shown("net", stats)
    assert "left out 12 modules: the search for parts ran out of time" in shown("net", stats | {"parts_left_out": 12})


def test_what_fused_calls_do_not_write_is_named(stats):
    assert "not written" not in shown("net", stats)
    text = shown("net", stats | {"not_written": ["last_map", "seen"]})
    assert "not written last_map, seen: the original forward sets these" in text


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


def test_the_layout_of_images_is_told_where_it_is_another(stats):
    told = "layout channels-last: the converted model uses this memory format, which was faster"
    assert "layout" not in shown("net", stats | {"layout": "contiguous"})
    assert told in shown("net", stats | {"layout": "channels_last"})
    assert told not in shown("net", stats | {"layout": "channels_last", "total_replaced": 0})
    first, second = (stats | {"layout": each, "sites": []} for each in ("contiguous", "channels_last"))
    assert comparison(first, second)["conditions"]["layout"] == ["contiguous", "channels_last"]
    assert "converted to channels-last" in page(second) and "channels-last" not in page(first)
