"""The counters of converted models in the format that Prometheus reads."""

import re
import warnings

import pytest
import torch
from support.smallest_net import Net, X
from torch import nn

import kfconvert
from kfconvert import ModelConverter, prometheus_text


@pytest.fixture(scope="module")
def net():
    """A converted model with two hits, and misses for a dtype and for a shape."""
    fused = ModelConverter(select="all").convert_model(Net(), example_inputs=X)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in (X, X, X[0], X[0], X[0]):
            fused(x)
    return fused


LABEL = r'([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"'
SAMPLE = re.compile(rf"(?P<name>\w+)\{{(?P<labels>{LABEL}(?:,{LABEL})*)\}} (?P<value>\d+)")
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def read(text):
    """{name: {labels as sorted pairs: value}}, by the rules of the format: the samples of one metric stand together,
    after its help and its type."""
    found, metric = {}, None
    assert text.endswith("\n")
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            metric = line.split(" ")[2]
            assert metric not in found
            found[metric] = {}
        elif line.startswith("# TYPE "):
            assert line.split(" ")[2:] == [metric, "counter" if metric.endswith("_total") else "gauge"]
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample and sample["name"] == metric, line
            labels = re.findall(LABEL, sample["labels"])
            told = ((name, re.sub(r"\\.", lambda escape: ESCAPES[escape[0]], value)) for name, value in labels)
            assert found[metric].setdefault(tuple(sorted(told)), int(sample["value"])) == int(sample["value"])
    return found


def test_hits_misses_recordings_and_memory_are_those_of_the_model(net):
    info, found = net.kfconvert_info(), read(prometheus_text(net))
    of_net = ("model", "Net"), ("module", "")
    assert found["kfconvert_hits_total"] == {of_net: 2}
    assert sum(found["kfconvert_misses_total"].values()) == 3
    assert found["kfconvert_misses_total"] == {
        (*of_net, ("reason", reason)): count for reason, count in info["guard"]["misses"].items()
    }
    assert found["kfconvert_recordings"] == found["kfconvert_replayed_calls_total"] == {of_net[:1]: 0}
    memory = {dict(labels)["kind"]: value for labels, value in found["kfconvert_memory_bytes"].items()}
    assert memory["weights"] == info["memory"]["weights"] > 0 and memory["recordings"] == 0
    assert memory["derived"] == info["memory"]["derived"]


def test_several_models_share_a_metric_and_have_labels_of_ones_own(net):
    found = read(prometheus_text({"first": net, 'the "second"\\\n': net}, {"zone": "a\nb"}))
    labels = [dict(labels) for labels in found["kfconvert_hits_total"]]
    assert labels == [{"model": name, "module": "", "zone": "a\nb"} for name in ("first", 'the "second"\\\n')]


def test_parts_and_models_that_are_given_back_are_told():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Net(), Net()])

        def forward(self, x):
            return self.blocks[0](x) if x.sum() > 0 else self.blocks[1](x)

    parts = ModelConverter(select="all").convert_model(Branching(), example_inputs=X.abs())
    with torch.no_grad():
        parts(X.abs())
    hits = read(prometheus_text(parts))["kfconvert_hits_total"]
    assert hits[("model", "Branching"), ("module", "blocks.0")] == 1
    with pytest.warns(UserWarning, match="fused nothing"):
        back = ModelConverter(include=[]).convert_model(Net(), example_inputs=X)
    assert read(prometheus_text(back))["kfconvert_hits_total"] == {(("model", "Net"), ("module", "")): 0}


@pytest.mark.parametrize("name", ["model", "reason", "9a", "a-b", "__a", ""])
def test_names_of_labels_that_cannot_be_are_refused(net, name):
    with pytest.raises(ValueError, match="cannot be the name of a label"):
        kfconvert.prometheus_text(net, {name: "x"})


def test_a_model_that_was_not_converted_is_refused():
    with pytest.raises(ValueError, match="this Net is not a converted model"):
        prometheus_text({"a": Net()})
