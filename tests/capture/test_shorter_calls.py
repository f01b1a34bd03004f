"""The call forms of a token model without token types or mask, derived from the one that has them."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from kfconvert import ModelConverter
from kfconvert.capture.captured import capture
from kfconvert.capture.fewer_arguments import shorter
from kfconvert.capture.tracer import free_dimensions
from kfconvert.inputs.example import ExampleCall

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
    return capture(model, "", call, [free_dimensions(model, call)])


def attention(capture):
    """The operators of attention in the graph of ``capture``, in order."""
    return [node.target for node in capture.region.graph.nodes if "attention" in str(node.target)]


def test_zeros_stand_for_the_token_types_of_bert():
    model = bert()
    full, short = calls(model)
    derived = shorter(captured(model, full), short)
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


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("types", [0, 1])
def test_zeros_stand_for_the_token_types_only_where_nothing_else_can(types, persistent):
    """A buffer that is saved with the model, or holds something else already, may come to hold other types."""
    model = bert()
    embeddings = model.embeddings
    embeddings.register_buffer("token_type_ids", torch.full_like(embeddings.token_type_ids, types), persistent)
    full, short = calls(model)
    assert (shorter(captured(model, full), short) is None) == (persistent or types == 1)


@pytest.mark.parametrize("default", ["nothing", "ones"])
def test_a_model_to_which_absent_types_mean_something_else(default):
    model = Segments(default).eval()
    full, short = calls(model)
    assert shorter(captured(model, full), short) is None


def test_types_that_make_no_difference_yet():
    """Absent types mean that nothing is added; that shows only once the embedding is trained."""
    model = Segments("nothing").eval()
    nn.init.zeros_(model.types.weight)
    full, short = calls(model)
    assert shorter(captured(model, full), short) is None


def test_a_model_without_a_configuration():
    model = Segments("nothing").eval()
    model.main_input_name = "input_ids"
    full, _ = calls(model)
    fused = ModelConverter(select="all").convert_model(model, example_inputs=full.kwargs)
    with torch.no_grad():
        torch.testing.assert_close(fused(**full.kwargs), model(**full.kwargs))


def without_mask(call):
    return ExampleCall((), {"input_ids": call.kwargs["input_ids"]})


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "Electra"])
def test_an_encoder_without_a_mask_is_the_graph_without_one(family):
    torch.manual_seed(0)
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 50}
    config = getattr(transformers, f"{family}Config")(**(sizes if family == "DistilBert" else SIZES))
    model = getattr(transformers, f"{family}Model")(config).eval()
    full, _ = calls(model)
    if family == "DistilBert":
        del full.kwargs["token_type_ids"]
    ids = without_mask(full)
    derived, traced = shorter(captured(model, full), ids), captured(model, ids)
    assert derived.region.inputs == traced.region.inputs == ["input_ids"]
    assert derived.region.dynamic() == traced.region.dynamic()
    assert attention(derived) == attention(traced)
    assert [m.site for m in derived.findings.matches] == [m.site for m in traced.findings.matches]
    for batch, length in ((1, 1), (3, 9)):
        ids = torch.randint(0, 50, (batch, length))
        assert derived.region.guard.refusal([ids]) is None
        with torch.no_grad():
            torch.testing.assert_close(derived.variant(()).run([ids])[0], model(ids)[0])


def test_a_decoder_without_a_mask_is_traced():
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, use_cache=False)
    ).eval()
    full, _ = calls(model)
    del full.kwargs["token_type_ids"]
    assert shorter(captured(model, full), without_mask(full)) is None


def test_a_model_that_numbers_its_tokens_by_the_padding_is_traced():
    model = transformers.RobertaModel(transformers.RobertaConfig(**SIZES)).eval()
    full, _ = calls(model)
    assert shorter(captured(model, full), without_mask(full)) is None


class Padded(nn.Module):
    """Where no mask is given, it hides the padding, wherever that is."""

    __module__ = "transformers.models.padded"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(50, 8), nn.Linear(8, 4)

    def forward(self, input_ids, attention_mask=None):
        mask = input_ids != 41 if attention_mask is None else attention_mask
        x = self.words(input_ids)[:, None]
        return self.last(nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask.bool()[:, None, None]))


class PaddedBert(transformers.BertModel):
    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        if attention_mask is None:
            attention_mask = (input_ids != 41).long()
        return super().forward(input_ids, attention_mask, **kwargs)


def padded_inside():
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    model.bert = PaddedBert(model.config)
    return model


def padded_on_the_instance():
    model = transformers.BertModel(transformers.BertConfig(**SIZES))

    def forward(input_ids=None, attention_mask=None):
        return PaddedBert.forward(padded, input_ids, attention_mask)

    padded = PaddedBert(model.config).eval()
    padded.load_state_dict(model.state_dict())
    model.forward = forward
    return model


@pytest.mark.parametrize("make", [Padded, padded_inside, padded_on_the_instance])
def test_a_model_that_masks_padding_by_itself(make):
    torch.manual_seed(0)
    model = make().eval()
    ids = torch.randint(0, 40, (2, 6))
    full = ExampleCall((), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    fused = ModelConverter(select="all").convert_model(model, example_inputs=full.kwargs)
    ids = ids.index_fill(1, torch.tensor([3, 5]), 41)
    with torch.no_grad():
        torch.testing.assert_close(pytree.tree_leaves(fused(ids)), pytree.tree_leaves(model(ids)))


def test_calls_that_differ_in_more():
    model = bert()
    full, short = calls(model)
    whole = captured(model, full)
    assert shorter(whole, full) is None
    assert shorter(captured(model, short), full) is None
    assert shorter(whole, ExampleCall((), {**short.kwargs, "position_ids": short.kwargs["input_ids"]})) is None
    assert shorter(whole, ExampleCall((), {"attention_mask": short.kwargs["attention_mask"]})) is None


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
