"""Adapters of peft on a converted model, changed in every order between calls."""

import copy
import random
import warnings
from functools import cache

import peft
import pytest
import torch
import transformers
from support import stateful_models
from support.adapter_changes import ADAPTER_CHANGES, adapted, converted, plain
from support.selection import each_once
from support.state_changes import Alike, Subject
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
ORDERS = 12


@cache
def _pair(adapted_before: bool) -> tuple[nn.Module, nn.Module]:
    """An adapted model and its conversion: made before the adapters, or after."""
    fused = converted(adapted_before)
    return adapted(plain()), fused if adapted_before else adapted(copy.deepcopy(fused))


def pair(adapted_before: bool) -> Alike:
    models = copy.deepcopy(_pair(adapted_before))
    return Alike(*(Subject(model, lambda seed: stateful_models.arguments(plain(), seed)) for model in models))


def changed(both: Alike, title: str) -> None:
    """Where the original refuses, the converted model must refuse as well."""
    refused = []

    def change(model: nn.Module) -> None:
        try:
            ADAPTER_CHANGES[title](model)
        except Exception as error:
            refused.append(type(error))
        else:
            refused.append(None)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both.each(change)
    assert refused[0] is refused[1]


@each_once(title=ADAPTER_CHANGES, adapted_before=[True, False])
def test_one_change_of_adapters(title, adapted_before):
    both = pair(adapted_before)
    both.call("before")
    changed(both, title)
    both.call(f"after: {title}")
    both.call("another call", seed=1)


@each_once(order=range(ORDERS), adapted_before=[True, False])
def test_changes_of_adapters_in_any_order(order, adapted_before):
    both = pair(adapted_before)
    titles = random.Random(order).choices(list(ADAPTER_CHANGES), k=8)
    both.call("before")
    for title in titles:
        changed(both, title)
        both.call(f"after: {titles[: titles.index(title) + 1]}")


def test_programs_of_adapted_models_are_used():
    """While nothing changes, and again when a change was taken back."""
    both = pair(True)
    assert isinstance(both.converted.model, peft.PeftModel)
    both.call("before")
    served = both.hits()
    assert served
    for title in ("scale layer", "unscale layer"):
        changed(both, title)
        both.call(title)
    hits = both.hits()
    both.call("scaled and unscaled")
    assert both.hits() == hits + served


def test_a_model_with_a_task_is_converted():
    """Its class holds the tables of ``AutoModel``, whose items import all models of transformers."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora).eval()
    ids = torch.randint(4, 60, (2, 6))
    fused = ModelConverter(select="all", effort="fast").convert_model(copy.deepcopy(model), example_inputs=ids)
    with torch.no_grad():
        torch.testing.assert_close(fused(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert fused.kfconvert_info()["total_replaced"]
