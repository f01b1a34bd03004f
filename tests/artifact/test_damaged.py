"""Damaged artifacts: whatever happened to their files, loading one is right or one line says what is wrong."""

import copy
import io
import json
import random
import warnings

import pytest
import torch
from rich.console import Console
from support.artifacts import refusal, rewrite, rewrite_graphs
from torch import nn

from kfconvert.artifact import files as artifact
from kfconvert.artifact import saving
from kfconvert.artifact.errors import ArtifactError
from kfconvert.converter import ModelConverter
from kfconvert.inputs import spec as input_spec
from kfconvert.report.explain import Explanation
from kfconvert.report.table import render

BATCH = (2, 3, 6, 6)


class Net(nn.Module):
    """A block that occurs twice, so that the record has parts, and a convolution with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))

    def forward(self, x):
        return self.blocks(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def saved(net, tmp_path_factory):
    converter = ModelConverter(validate_accuracy=False, select="all")
    path = saving.save(converter.convert_model(net, input_shape=BATCH), tmp_path_factory.mktemp("saved") / "net")
    record = artifact.read_record(path)
    assert record["parts"] and record["calls"] and record["statistics"]["sites"] and (path / "graphs.json").exists()
    return path


def is_right(path, net) -> bool:
    """Whether the artifact loads as what it is; False where it is refused in one line. Anything else is an error."""
    x = torch.randn(BATCH)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            loaded = artifact.load(path, model=Net())
        except ArtifactError as error:
            assert "\n" not in str(error)
            return False
        torch.testing.assert_close(loaded(x), net(x), rtol=1e-4, atol=1e-5)
    statistics = loaded.kfconvert_info()
    console = Console(file=io.StringIO(), width=1000)
    console.print(Explanation(statistics), render("net", statistics))
    return True


@pytest.mark.parametrize("name", ["kfconvert.json", "model.safetensors", "graphs.json"])
def test_a_file_that_is_missing_or_replaced_is_one_line(path, name):
    file = path / name
    content = file.read_bytes()
    for damaged in (b"", content[: len(content) // 2], content + b" ", b"\xff\xfe\x00", b"{", b"[]", b"null"):
        file.write_bytes(damaged)
        if not (name == "kfconvert.json" and damaged == content + b" "):
            assert name in refusal(path, model=Net())
    file.unlink()
    assert name in refusal(path, model=Net())
    file.symlink_to(path / "nothing")
    assert name in refusal(path, model=Net())
    file.unlink()
    file.mkdir()
    assert name in refusal(path, model=Net())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "has format 99"),
        ({"format": None}, "has format None"),
        ({"calls": None}, "is damaged: it is wrong in calls"),
        ({"calls": [{"tensor": {"shape": [1], "dtype": "no"}}]}, "cannot be read"),
    ],
)
def test_records_with_checksums_that_fit(path, changes, message):
    rewrite_graphs(path, None)
    rewrite(path, **changes)
    assert message in refusal(path, model=Net())


@pytest.mark.parametrize("config", [[], {"efort": "fast"}, {"exclude": [1]}, {"modules": 3}, {"select": None}])
def test_options_that_a_conversion_cannot_have_are_refused(path, config):
    record = artifact.read_record(path)
    record["statistics"]["config"] = config
    rewrite(path, **record)
    assert "kfconvert.json is damaged: it is wrong in statistics.config" in refusal(path, model=Net())


def test_every_flipped_bit_is_noticed(path, net):
    """One at a time, in both files that are read, at random places and at every byte of the header of the weights."""
    draw = random.Random(0)
    for file in (path / "kfconvert.json", path / "model.safetensors"):
        content = file.read_bytes()
        for place in [draw.randrange(len(content)) for _ in range(40)] + list(range(16)):
            damaged = bytearray(content)
            damaged[place] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            if file.name == "model.safetensors":
                assert "is damaged: it does not match its checksum" in refusal(path, model=Net())
            else:
                assert not is_right(path, net) or json.loads(damaged) == json.loads(content)
        file.write_bytes(content)
    assert is_right(path, net)


def test_what_a_person_reads_is_of_no_account_for_the_load(path, net):
    (path / "report.html").write_text("<script>")
    assert is_right(path, net)
    (path / "report.html").unlink()
    assert is_right(path, net)


def places(value, at=()):
    """The way to every value within a JSON value."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


VALUES = [None, True, -1, 2**40, 2**70, 0.5, "x", "blocks.0.0", [], {}, [[]], [[0, 9]], [None], {"x": 1}]
# What takes the damage: without what a person reads only, which is of no account for the load.
READ = ("device", "recipe", "calls", "parts", "sites", "part_sites", "layout", "config", "cuda_graphs")


def test_every_damage_to_a_record_is_refused_or_loads_right(path, net):
    """Values of other types and lengths in random places, with checksums that fit."""
    record = json.loads((path / "kfconvert.json").read_text())
    draw, outcomes = random.Random(2), set()
    found = [at for at in places(record) if at and any(key in at[:2] for key in READ)]
    for place in draw.sample(found, 30):
        damaged = copy.deepcopy(record)
        holder = damaged
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = draw.choice(VALUES)
        rewrite(path, **damaged)
        outcomes.add(is_right(path, net))
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    "spec",
    [
        {"tensor": {"shape": [2**62, 2**62], "dtype": "bool"}}, {"tensor": {"shape": [-1], "dtype": "float32"}},
        {"tensor": {"shape": [1], "dtype": "load"}}, {"tensor": {"shape": [1], "dtype": "int64", "low": "a"}},
        {"tensor": None}, {"tensor": {"same": 3}}, {"output": [["subprocess", "Popen"], {}]},
        {"cache": [{"class": ["subprocess", "Popen"]}, []]}, {"list": [], "tuple": []}, {}, None,
    ],
    ids=str,
)  # fmt: skip
def test_descriptions_of_inputs_that_cannot_be_made(spec):
    with pytest.raises(input_spec.InputSpecError) as caught:
        input_spec.build(spec)
    assert "\n" not in str(caught.value)
