"""``ConversionConfig``: the options of a conversion as one object, and as JSON."""

import json
import pickle

import pytest
from pydantic import ValidationError

from kfconvert import ConversionConfig, ConversionError

SOME = {
    "accuracy_threshold": 1e-3, "select": "all", "check_weights": 0, "cuda_graphs": True, "max_recordings": 3,
    "max_extra_memory": 0.25, "exclude": ("conv_bn*",), "modules": ("encoder.*", "head"),
    "chosen_modules": ("", "head"),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, SOME, {"include": (), "max_extra_memory": 1, "effort": "fast"}])
def test_json_and_back(options):
    config = ConversionConfig(**options)
    again = ConversionConfig.from_json(config.to_json())
    assert again == config and hash(again) == hash(config) and repr(again) == repr(config)
    assert {name: getattr(again, name) for name in options} == options
    # Bytes are an int and a share is a float, also where both are 1.
    assert type(again.max_extra_memory) is type(options.get("max_extra_memory"))
    assert pickle.loads(pickle.dumps(config)) == config
    assert ConversionConfig(**json.loads(config.to_json())) == config


def test_it_cannot_be_changed_but_copied_with_changes():
    config = ConversionConfig(effort="fast")
    with pytest.raises(ValidationError, match="frozen"):
        config.effort = "full"
    assert config.changed(select="all") == ConversionConfig(effort="fast", select="all")
    with pytest.raises(ConversionError, match="^select must be 'measured' or 'all', not 'some'$"):
        config.changed(select="some")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "it is not a JSON object"),
        (None, "must be str"),
        ("[" * 100_000, "recursion"),
        ('{"efort": "fast"}', "there is no option 'efort'; did you mean 'effort'?"),
        ('{"effort": 3}', "effort must be 'fast' or 'full', not 3"),
        ('{"validate_accuracy": 1}', "validate_accuracy must be True or False, not 1"),
        ('{"accuracy_threshold": NaN}', "accuracy_threshold must be a number of at least 0, not nan"),
        ('{"max_extra_memory": true}', "max_extra_memory must be bytes as an int or a share as a float"),
        ('{"exclude": [1]}', "exclude must be a list of names of patterns, not 1"),
        ('{"modules": {"a": 1}}', "modules must be a list of paths of modules, not {'a': 1}"),
    ],
)
def test_json_of_another_kind_is_refused_in_one_line(text, message):
    with pytest.raises(ConversionError) as error:
        ConversionConfig.from_json(text)
    assert str(error.value).startswith("invalid conversion configuration: ")
    assert message in str(error.value) and "\n" not in str(error.value)
