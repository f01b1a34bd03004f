"""Small models with random weights, shared by test files, and what those ask of a converted one."""

import copy
from collections.abc import Callable
from functools import cache

import torch
import transformers
from torch import nn

from kfconvert import ModelConverter, validate_optimization

_SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 60,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


class CNN(nn.Module):
    """Convolutions with batch norms, a residual and a head. (batch, 3, 12, 12) -> (batch, 5)"""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)) + x)
        return self.head(self.dropout(x.mean((2, 3))))


class Gate(nn.Module):
    """A gated linear unit. two of (batch, 6) -> (batch, 6)"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, a, b):
        return nn.functional.gelu(self.linear(a)) * b


def cnn() -> nn.Module:
    torch.manual_seed(0)
    model = CNN()
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 12, 12))  # running statistics that are not 0 and 1
    return model.eval()


def bert() -> nn.Module:
    torch.manual_seed(0)
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**_SIZES, **dropouts, num_hidden_layers=2, num_labels=3)
    return transformers.BertForSequenceClassification(config).eval()


def llama() -> nn.Module:
    torch.manual_seed(0)
    options = {"num_key_value_heads": 2, "use_cache": False, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**_SIZES, **options, num_hidden_layers=1)
    return transformers.LlamaForCausalLM(config).eval()


MAKERS = {"cnn": cnn, "bert": bert, "llama": llama}


def inputs_of(model: nn.Module, batch: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Keyword arguments for one of the models above."""
    noise = torch.Generator().manual_seed(seed)
    if isinstance(model, transformers.PreTrainedModel):
        return {"input_ids": torch.randint(3, 60, (batch, 7), generator=noise)}
    dtype = next(model.parameters()).dtype
    return {"x": torch.randn(batch, 3, 12, 12, generator=noise).to(dtype)}


def convert(model: nn.Module, **options) -> nn.Module:
    """Every accurate site applied, of which there must be some, whether faster on this machine or not."""
    options.setdefault("example_inputs", inputs_of(model))
    settings = {name: options.pop(name) for name in ("validate_accuracy", "effort") if name in options}
    converter = ModelConverter(select="all", **settings)
    converted = converter.convert_model(model, **options)
    stats = converter.conversion_stats
    assert stats["total_replaced"], stats["nothing_fused"]
    return converted


def converted(make: Callable[[], nn.Module]) -> nn.Module:
    """A converted ``make()`` of one's own, for one conversion in all."""
    return copy.deepcopy(_converted(make))


@cache
def _converted(make: Callable[[], nn.Module]) -> nn.Module:
    return convert(make(), effort="fast")


def assert_valid(original: nn.Module, converted: nn.Module, inputs=None) -> None:
    """``converted`` is as close to a float64 run of ``original`` as ``original`` itself."""
    result = validate_optimization(original, converted, inputs or inputs_of(original, batch=3, seed=1))
    assert result.passed, result.summary()


def guard(model: nn.Module) -> dict:
    return model.kfconvert_info()["guard"]


def change_weights(*models: nn.Module) -> None:
    """The same new weights for all models, written in place."""
    for model in models:
        noise = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in dict.fromkeys(model.parameters()):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise).to(parameter.dtype))
