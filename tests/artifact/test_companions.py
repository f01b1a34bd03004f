"""Artifacts of Hugging Face models: what ``from_pretrained`` reads beside the weights, and loads without ``model=``."""

import copy
import json
import types

import pytest
import torch
import transformers
from support import small_models
from torch import nn

import kfconvert
from kfconvert import zoo
from kfconvert.artifact import ArtifactError

SIZES = dict(
    vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=16,
)  # fmt: skip
X = {"input_ids": torch.tensor([[2, 5, 6, 3]])}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]


def converted(model, **options):
    converter = kfconvert.ModelConverter(select="all", effort="fast", validate_accuracy=False)
    return converter.convert_model(model, example_inputs=X, **options)


def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_labels=3, id2label={0: "bad", 1: "so so", 2: "good"})
    return transformers.BertForSequenceClassification(config).eval()


def language_model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=8, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    config.bos_token_id = config.eos_token_id = 1
    model = transformers.GPT2LMHeadModel(config).eval()
    model.generation_config.max_new_tokens = 5
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder as users have them: a fine-tuned classifier with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    classifier().save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fused(checkpoint):
    return converted(transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint).eval())


@pytest.fixture(scope="module")
def saved(fused, tmp_path_factory):
    return kfconvert.save(fused, tmp_path_factory.mktemp("saved") / "out")


def logits(model):
    with torch.no_grad():
        return model(**X).logits


def test_transformers_reads_the_folder_by_itself(fused, saved):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(saved).eval()
    torch.testing.assert_close(logits(model), logits(fused))
    assert model.config.id2label[1] == "so so"
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    assert tokenizer("one two")["input_ids"] == [2, 5, 6, 3]


def test_it_is_loaded_without_the_model_and_saved_again_with_its_tokenizer(fused, path, tmp_path):
    names = {file.name for file in path.iterdir()}
    record = json.loads((path / "kfconvert.json").read_text())
    assert record["files"].keys() == names - {"kfconvert.json"}
    loaded = kfconvert.load(path)
    assert type(loaded) is transformers.BertForSequenceClassification
    assert torch.equal(logits(loaded), logits(fused)) and loaded.kfconvert_info()["guard"]["hits"] == 1
    for target in (path, tmp_path / "other"):
        kfconvert.save(loaded, target)
        assert {file.name for file in target.iterdir()} == names >= {"config.json", "tokenizer.json"}


def test_half_types_are_those_of_the_configuration(checkpoint, tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    kfconvert.save(converted(model, dtype=torch.bfloat16), tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.dtype is kfconvert.load(tmp_path).dtype is torch.bfloat16


def test_how_it_generates_comes_back(tmp_path):
    model = language_model()
    kfconvert.save(converted(model), tmp_path)
    for loaded in (kfconvert.load(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert loaded.generation_config.max_new_tokens == 5
        assert torch.equal(loaded.generate(X["input_ids"]), model.generate(X["input_ids"]))


class Own(transformers.BertForSequenceClassification):
    pass


def with_another_number(model):
    model.bert.encoder.layer[0].output.LayerNorm.eps = 0.5


def with_one_layer_less(model):
    model.bert.encoder.layer = nn.ModuleList()


def of_another_class(model):
    model.__class__ = Own


def with_a_method_of_its_own(model):
    model.bert._do_something = lambda x: x


def with_weights_tied_by_hand(model):
    model.bert.encoder.layer[0].attention.self.key.weight = model.bert.encoder.layer[0].attention.self.query.weight


def with_a_configuration_of_a_part(model):
    model.bert.config = transformers.BertConfig(**SIZES, hidden_act="relu")


def with_a_hook(model):
    model.bert.pooler.register_forward_hook(lambda module, inputs, output: output * 2)


def with_a_parametrization(model):
    nn.utils.parametrizations.weight_norm(model.classifier)


CHANGES = [
    with_a_hook, with_a_parametrization, with_a_method_of_its_own, with_weights_tied_by_hand,
    with_a_configuration_of_a_part, with_another_number, with_one_layer_less, of_another_class,
]  # fmt: skip


def resized(model):
    model.resize_token_embeddings(12)


@pytest.mark.parametrize("harmless", [lambda m: m, lambda m: m.half(), lambda m: m.train(), resized])
def test_a_model_as_it_was_made_is_described_by_its_configuration(harmless):
    for model in (classifier(), language_model()):
        harmless(model)
        assert zoo.described(model)["class"] == type(model).__name__


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_is_not(change):
    model = classifier()
    change(model)
    assert zoo.described(model) is None


CONVOLUTIONS = dict(conv_dim=(8,), conv_stride=(5,), conv_kernel=(10,), num_conv_pos_embeddings=4)
MADE_WITH = {
    "weight norm": lambda: transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(**SIZES, **CONVOLUTIONS, num_conv_pos_embedding_groups=2)
    ),
    "weak references": lambda: transformers.EncodecModel(
        transformers.EncodecConfig(num_filters=4, hidden_size=8, codebook_size=8, codebook_dim=8, num_lstm_layers=1)
    ),
    "hooks for old weights": lambda: transformers.MambaModel(
        transformers.MambaConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1)
    ),
}


@pytest.mark.parametrize("make", MADE_WITH.values(), ids=MADE_WITH)
def test_what_a_class_makes_of_its_modules_it_makes_again(make):
    model = make().eval()
    for each in (model, copy.deepcopy(model)):
        assert zoo.described(each)["class"] == type(model).__name__


def test_a_model_with_a_forward_of_its_own_is_not_made_of_its_configuration(tmp_path):
    model = classifier()
    pooler = model.bert.pooler
    pooler.forward = types.MethodType(lambda self, x: self.dense(x[:, 0]), pooler)
    kfconvert.save(converted(model), tmp_path)
    with pytest.raises(ArtifactError, match="does not say how to build its .*: pass model="):
        kfconvert.load(tmp_path)


def test_files_of_the_artifact_before_are_gone_and_those_of_others_stay(path):
    (path / "vocab.txt").write_text("of the user")
    (path / "merges.txt").write_text("of the user")
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    kfconvert.save(small_models.convert(other, example_inputs=torch.randn(2, 4)), path)
    assert {file.name for file in path.iterdir()} == {
        "graphs.json", "kfconvert.json", "model.safetensors", "report.html", "vocab.txt", "merges.txt"
    }  # fmt: skip


def test_what_a_recipe_says_of_generating_chooses_no_code_and_no_files():
    recipe = zoo.described(language_model())
    recipe["generation"] |= {"cache_implementation": "static"}
    assert zoo.rebuild(recipe).generation_config.cache_implementation == "static"
    for value in ({"backend": "evil"}, ["a b/c"], "https://a"):
        recipe["generation"] |= {"compile_config": value}
        with pytest.raises(zoo.ZooError, match="compile_config of its GenerationConfig"):
            zoo.rebuild(recipe)
