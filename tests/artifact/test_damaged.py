"""Damaged artifacts: whatever happened to their files, loading one is right or one line says what is wrong."""

import copy
import io
import json
import os
import random
import threading
import warnings

import pytest
import torch
from rich.console import Console
from support import selection
from torch import nn

from kfconvert.artifact import files as artifact
from kfconvert.artifact import record as record_file
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
    assert record["parts"] and record["calls"] and record["statistics"]["sites"]
    return path


def seal(path, record) -> None:
    """Writes ``record`` with checksums that fit, as somebody does who means harm."""
    (path / "kfconvert.json").unlink()
    (path / "kfconvert.json").write_text(record_file.sealed(record, path))


def refusal(path, model: nn.Module | None = None) -> str:
    with pytest.raises(ArtifactError) as caught:
        artifact.load(path, model=model or Net())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


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


@pytest.mark.parametrize("name", ["kfconvert.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "nothing", "huge", "link to nothing"])
def test_what_stands_in_the_place_of_a_file_is_not_read(path, name, kind):
    file = path / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    elif kind == "link to nothing":
        file.symlink_to(path / "nothing")
    elif kind == "huge":
        file.touch()
        os.truncate(file, 2**42)  # takes no room on the disk
    message = []
    # Where it waits for a writer, or reads on and on, the test must end all the same.
    loading = threading.Thread(target=lambda: message.append(refusal(path)), daemon=True)
    loading.start()
    loading.join(30)
    assert message and path.name in message[0]


@pytest.mark.parametrize("config", [[], {"efort": "fast"}, {"exclude": [1]}, {"modules": 3}, {"select": None}])
def test_options_that_a_conversion_cannot_have_are_refused(path, config):
    record = artifact.read_record(path)
    record["statistics"]["config"] = config
    seal(path, record)
    assert "kfconvert.json is damaged: it is wrong in statistics.config" in refusal(path)


def test_every_flipped_bit_is_noticed(path, net):
    """One at a time, in both files that are read, at random places and at every byte of the header of the weights."""
    draw = random.Random(0)
    for file in (path / "kfconvert.json", path / "model.safetensors"):
        content = file.read_bytes()
        places = [draw.randrange(len(content)) for _ in range(60)] + list(range(16))
        for place in places:
            bit = 1 << draw.randrange(8)
            damaged = bytearray(content)
            damaged[place] ^= bit
            file.write_bytes(damaged)
            if file.name == "model.safetensors":
                assert "is damaged: it does not match its checksum" in refusal(path)
            else:
                assert not is_right(path, net) or json.loads(damaged) == json.loads(content)
        file.write_bytes(content)
    assert is_right(path, net)


def test_what_a_person_reads_is_of_no_account_for_the_load(path, net):
    (path / "report.html").write_text("<script>")
    assert is_right(path, net)
    (path / "report.html").unlink()
    assert is_right(path, net)


def test_weights_of_another_save_are_noticed(path, net):
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes() + b" ")
    assert "bytes, not" in refusal(path)


@pytest.mark.parametrize("version", [1, 2])
def test_formats_without_checksums_still_load(path, net, version):
    record = json.loads((path / "kfconvert.json").read_text())
    del record["files"], record["checksum"]
    if version == 1:
        del record["parts"]
    (path / "kfconvert.json").write_text(json.dumps({**record, "format": version}))
    assert is_right(path, net)


def test_the_newest_format_has_checksums(path):
    record = json.loads((path / "kfconvert.json").read_text())
    for missing in ("files", "checksum"):
        without = {key: value for key, value in record.items() if key != missing}
        (path / "kfconvert.json").write_text(json.dumps(without))
        assert "no checksums" in refusal(path)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        '{"format": 2, "calls": [' + '{"list": [' * 5000 + "]}" * 5000 + "]}",
        '{"format": ' + "9" * 10_000 + "}",
        '{"format": 2, "x": NaN}',
        '{"format": true}',
        '{"format": [3]}',
        "null",
        "",
        '"\\ud800"',
        "\0",
    ],
    ids=range(10),
)
def test_json_of_any_shape_is_one_error(path, text):
    (path / "kfconvert.json").write_text(text)
    refusal(path)


def places(value, at=()):
    """The way to every value within a JSON value."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


def replaced(record, place, value):
    damaged = copy.deepcopy(record)
    holder = damaged
    for key in place[:-1]:
        holder = holder[key]
    if value is places:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return damaged


def nested(depth: int):
    value = []
    for _ in range(depth):
        value = {"list": [value]}
    return value


VALUES = [None, True, -1, 2**40, 2**70, 0.5, "x", "blocks.0.0", [], {}, [[]], [[0, 9]], [None], {"x": 1}, nested(300)]
VALUES.append(places)  # which stands for taking the value out
# What takes the damage: without what a person reads only, which is of no account for the load.
READ = (
    *("format", "device", "recipe", "calls", "parts", "files"),
    *("sites", "part_sites", "layout", "near_misses", "regions"),
)


def damages(record, count: int, seed: int):
    draw = random.Random(seed)
    found = [at for at in places(record) if any(key in at[:2] for key in READ)]
    for _ in range(count):
        place, value = draw.choice(found), draw.choice(VALUES)
        yield place, value, replaced(record, place, value)


def test_every_damage_to_a_record_is_refused_or_harmless(path):
    """Before anything is made of it: a thousand values of other types, lengths and depths in random places."""
    record = json.loads((path / "kfconvert.json").read_text())
    accepted = 0
    for _, _, damaged in damages(record, 1000, seed=1):
        try:
            seal(path, damaged)
            artifact.read_record(path)
            accepted += 1
        except (ArtifactError, record_file.RecordError):
            continue
    assert 0 < accepted < 700


def test_every_damage_that_fits_the_schema_is_refused_or_loads_right(path, net):
    record = json.loads((path / "kfconvert.json").read_text())
    outcomes = []
    for place, value, damaged in damages(record, 150 if selection.EXHAUSTIVE else 40, seed=2):
        damaged = {key: inner for key, inner in damaged.items() if key not in ("files", "checksum")}
        damaged["format"] = 2 if damaged.get("format") == record["format"] else damaged.get("format")
        (path / "kfconvert.json").write_text(json.dumps(damaged))
        outcomes.append(is_right(path, net))
    assert {True, False} == set(outcomes)


@pytest.mark.parametrize(
    "spec",
    [
        {"tensor": {"shape": [2**20, 2**20], "dtype": "float32"}},
        {"list": [{"tensor": {"shape": [2**15, 2**15], "dtype": "float32"}}] * 3},
        {"tensor": {"shape": [2**62, 2**62], "dtype": "bool"}},
        {"tensor": {"shape": [10**30, 0], "dtype": "bool"}},
        {"tensor": {"shape": [-1], "dtype": "float32"}},
        {"tensor": {"shape": [1] * 100, "dtype": "float32"}},
        {"tensor": {"shape": [1.5], "dtype": "float32"}},
        {"tensor": {"shape": "ab", "dtype": "float32"}},
        {"tensor": {"shape": [1], "dtype": "load"}},
        {"tensor": {"shape": [1], "dtype": ["float32"]}},
        {"tensor": {"shape": [1], "dtype": "qint8"}},
        {"tensor": {"shape": [1], "dtype": "int64", "low": 5, "high": 4}},
        {"tensor": {"shape": [1], "dtype": "int64", "low": 0, "high": 2**70}},
        {"tensor": {"shape": [1], "dtype": "int64", "low": "a"}},
        {"tensor": None},
        {"value": {"x": 1}},
        {"dict": [1]},
        {"tuple": {"x": 1}},
        {"list": [], "tuple": []},
        {},
        [],
        None,
        5,
    ],
    ids=str,
)
def test_descriptions_of_inputs_that_cannot_be_made(spec):
    with pytest.raises(input_spec.InputSpecError) as caught:
        input_spec.build(spec)
    assert "\n" not in str(caught.value)


def test_inputs_that_could_not_be_made_again_are_not_described():
    with pytest.raises(input_spec.InputSpecError, match="more than"):
        input_spec.describe(torch.empty(2**20, 2**20, device="meta"))
