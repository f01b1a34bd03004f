"""``generate`` is timed before and after a conversion, and both are told."""

import json

import pytest
import torch
import transformers
from torch import nn

import kfconvert
from kfconvert import ModelConverter
from kfconvert.report.table import generation_line

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")


def language_model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    config.bos_token_id = config.eos_token_id = 1
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def converter():
    converter = ModelConverter(select="all", validate_accuracy=False, effort="fast", new_tokens=6)
    converter.model = converter.convert_model(language_model(), input_shape=(2, 9))
    return converter


def test_the_statistics_have_tokens_a_second_prefill_and_step(converter):
    generation = converter.conversion_stats["generation"]
    assert generation["prompt"] == [2, 9] and generation["new_tokens"] == 6
    for side in (generation["original"], generation["converted"]):
        whole = side["prefill_ms"] + 5 * side["step_ms"]
        assert side["tokens_per_s"] == pytest.approx(1e3 * 2 * 6 / whole)
    ratio = generation["speedup"]["ratio"]
    rates = generation["converted"]["tokens_per_s"] / generation["original"]["tokens_per_s"]
    assert ratio > 0 and rates > 0 and generation["speedup"]["low"] <= ratio <= generation["speedup"]["high"]
    assert converter.model.kfconvert_info()["guard"] == {"hits": 0, "misses": {}}


def test_the_report_has_a_line_of_them(converter):
    line = generation_line(converter.conversion_stats)
    assert line.startswith("prompt 2 x 9, 6 new: ") and " tokens/s, prefill " in line and ", step " in line
    assert generation_line({"generation": None}) == generation_line({}) == ""


def test_an_artifact_keeps_them(converter, tmp_path):
    kfconvert.save(converter.model, tmp_path)
    generation = converter.conversion_stats["generation"]
    assert kfconvert.load(tmp_path).kfconvert_info()["generation"] == generation
    assert json.loads((tmp_path / "kfconvert.json").read_text())["statistics"]["generation"] == generation


def test_as_many_tokens_as_there_is_time_for():
    converter = ModelConverter(select="all", validate_accuracy=False, effort="fast")
    converter.convert_model(language_model(), input_shape=(2, 9))
    assert 4 <= converter.conversion_stats["generation"]["new_tokens"] <= 32


@pytest.mark.parametrize("why", ["not wanted", "does not generate", "raises"])
def test_none_where_there_is_nothing_to_time(why, monkeypatch):
    model, given = language_model(), {"input_shape": (2, 9)}
    if why == "raises":
        model.generation_config.num_return_sequences = 3  # greedily, there is but one
    elif why == "does not generate":
        model, given = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), {"example_inputs": torch.randn(2, 4)}
    tokens = 0 if why == "not wanted" else None
    converter = ModelConverter(select="all", validate_accuracy=False, new_tokens=tokens, effort="fast")
    converter.convert_model(model, **given)
    assert converter.conversion_stats["generation"] is None and converter.conversion_stats["timings"] is not None


def test_more_tokens_than_positions():
    converter = ModelConverter(select="all", validate_accuracy=False, new_tokens=500, effort="fast")
    with pytest.warns(UserWarning, match=r"generate\(\) of 500 tokens was not timed: "):
        converter.convert_model(language_model(), input_shape=(2, 9))
    assert converter.conversion_stats["generation"] is None


def test_numbers_of_tokens_that_cannot_be():
    with pytest.raises(kfconvert.ConversionError, match="new_tokens must be a number of tokens, 0 for no timing"):
        ModelConverter(new_tokens=-1)
