"""The call form of a token model without token types, derived from the one that has them."""

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter
from kfconvert.capture import capture
from kfconvert.inputs import ExampleCall
from kfconvert.tracer import free_places
from kfconvert.token_types import without_token_types

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}


def bert():
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()


class Segments(nn.Module):
    """Adds an embedding of the token types only where they are given, or ones where they are not."""

    def __init__(self, default):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.types, self.last = nn.Embedding(50, 8), nn.Embedding(2, 8), nn.Linear(8, 4)
        self.default = default

    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        hidden = self.words(input_ids)
        if token_type_ids is None and self.default == "ones":
            token_type_ids = torch.ones_like(input_ids)
        if token_type_ids is not None:
            hidden = hidden + self.types(token_type_ids)
        return self.last(hidden * attention_mask[..., None])


def calls(model):
    ids = torch.randint(0, 50, (2, 6))
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    full = ExampleCall((), kwargs)
    return full, ExampleCall((), {name: kwargs[name] for name in ("input_ids", "attention_mask")})


def captured(model, call):
    return capture(model, "", call, [free_places(model, call)])


def test_zeros_stand_for_the_token_types_of_bert():
    model = bert()
    full, short = calls(model)
    derived = without_token_types(captured(model, full), short)
    traced = captured(model, short)
    assert derived.region.inputs == traced.region.inputs
    assert derived.region.call.names == traced.region.call.names
    assert derived.region.dynamic() == traced.region.dynamic()
    assert [m.site for m in derived.findings.matches] == [m.site for m in traced.findings.matches]
    for batch, length in ((1, 1), (3, 9)):
        ids = torch.randint(0, 50, (batch, length))
        mask = (torch.arange(length) < length - 1).expand(batch, length).long() if length > 1 else torch.ones_like(ids)
        assert derived.region.guard.refusal([ids, mask]) is None
        with torch.no_grad():
            expected = model(ids, mask)
            actual = derived.variant(()).run([ids, mask])
        torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state)
    assert derived.region.guard.refusal([torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 3, dtype=torch.int64)])


@pytest.mark.parametrize("default", ["nothing", "ones"])
def test_a_model_to_which_absent_types_mean_something_else(default):
    model = Segments(default).eval()
    full, short = calls(model)
    assert without_token_types(captured(model, full), short) is None


def test_types_that_make_no_difference_yet():
    """Absent types mean that nothing is added; that shows only once the embedding is trained."""
    model = Segments("nothing").eval()
    nn.init.zeros_(model.types.weight)
    full, short = calls(model)
    assert without_token_types(captured(model, full), short) is None


def test_a_model_without_a_configuration():
    model = Segments("nothing").eval()
    model.main_input_name = "input_ids"
    full, _ = calls(model)
    fused = ModelConverter(select="all").convert_model(model, example_inputs=full.kwargs)
    with torch.no_grad():
        torch.testing.assert_close(fused(**full.kwargs), model(**full.kwargs))


def test_calls_that_differ_in_more():
    model = bert()
    full, short = calls(model)
    whole = captured(model, full)
    assert without_token_types(whole, full) is None
    assert without_token_types(whole, ExampleCall((), {"input_ids": short.kwargs["input_ids"]})) is None
    assert without_token_types(captured(model, short), short) is None


def test_every_form_of_a_converted_model_is_fused_and_right():
    original = bert()
    converter = ModelConverter(select="all")
    fused = converter.convert_model(original, input_shape=(2, 6))
    names = [region["name"] for region in converter.conversion_stats["regions"] if not region["module"]]
    assert len(names) == 3
    full, short = calls(original)
    for arguments in (full.kwargs, short.kwargs, {"input_ids": full.kwargs["input_ids"]}):
        with torch.no_grad():
            torch.testing.assert_close(fused(**arguments).pooler_output, original(**arguments).pooler_output)
    assert fused.kfconvert_info()["guard"] == {"hits": 3, "misses": {}}
