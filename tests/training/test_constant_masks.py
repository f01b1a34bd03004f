"""Attention masks that no input determines: causal ones become a flag, and gradients stay those of the original."""

import copy

import pytest
import torch
import transformers
from torch.nn import functional as F

from kfconvert.training import constant_masks
from kfconvert.training.backend import compile_graph

N = 12


def positions(x):
    """As transformers builds it."""
    q, k = torch.arange(N, device=x.device)[None, None, :, None], torch.arange(N, device=x.device)[None, None, None, :]
    return (q.new_ones((), dtype=torch.bool) & (k <= q)).expand(x.shape[0], -1, N, N)


CAUSAL = {
    "positions": positions,
    "tril": lambda x: torch.ones(N, N, dtype=torch.bool).tril(),
    "added": lambda x: torch.full((N, N), float("-inf")).triu(1),
    "added least": lambda x: torch.zeros(N, N).masked_fill(torch.ones(N, N).triu(1).bool(), torch.finfo(x.dtype).min),
}
FULL = {"ones": lambda x: torch.ones(2, 1, N, N, dtype=torch.bool), "zeros": lambda x: torch.zeros(N, N)}


def written(x):
    mask = torch.ones(N, N, dtype=torch.bool)
    mask[0].fill_(False)
    mask[0, 1:2] = True
    return mask


KEPT = {
    "window": lambda x: positions(x) & (torch.arange(N)[:, None] - torch.arange(N) < 5),
    "one row": lambda x: torch.ones(1, N, dtype=torch.bool).tril(),
    "an input": lambda x: positions(x) & (x[:, :, 0] < 99)[:, None, None, :],
    "bias": lambda x: torch.arange(N) * -0.1 + torch.zeros(N, 1),
    "written": written,
    "random": lambda x: torch.rand(N, N) < 2,
    "above": lambda x: torch.ones(N, N, dtype=torch.bool).triu(),
}


@pytest.fixture
def attentions(monkeypatch):
    """The arguments of all calls of attention in compiled graphs, which run as they are."""
    found = []

    def run(module, inputs):
        for node in module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
            found.append((node.kwargs.get("attn_mask", (*node.args, None)[3]), dict(node.kwargs)))
        return module.forward

    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", run)
    return found


def check(function, *inputs):
    leaves = [[each.clone().requires_grad_() for each in inputs] for _ in range(2)]
    outputs = [call(*given) for call, given in zip((torch.compile(function, backend=compile_graph), function), leaves)]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*[[leaf.grad for leaf in given] for given in leaves])


@pytest.mark.parametrize("name", [*CAUSAL, *FULL, *KEPT])
def test_masks(attentions, name):
    mask = (CAUSAL | FULL | KEPT)[name]
    check(
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None].sin(), x[:, None], mask(x)),
        torch.randn(2, N, 8),
    )
    ((kept, options),) = attentions
    assert (kept is not None, bool(options.get("is_causal"))) == (name in KEPT, name in CAUSAL)


def test_a_causal_mask_for_fewer_queries_is_kept(attentions):
    def attend(x):
        mask = torch.ones(N, N, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x[:, :1], x, x, mask[:1]) + F.scaled_dot_product_attention(x, x, x, mask)

    check(attend, torch.randn(2, N, 8))
    assert [options.get("is_causal", False) for _, options in attentions] == [False, True]


CONFIG = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "pad_token_id": 0}
NO_DROPOUT = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
MODELS = {
    "gpt2": (transformers.GPT2Config, {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, **NO_DROPOUT}),
    "llama": (transformers.LlamaConfig, {**CONFIG, "num_key_value_heads": 2}),
    "mistral": (transformers.MistralConfig, {**CONFIG, "num_key_value_heads": 1, "sliding_window": 5}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(attentions, monkeypatch, name):
    monkeypatch.setattr(constant_masks, "accepts_fewer_heads", lambda result: True)
    torch.manual_seed(0)
    kind, sizes = MODELS[name]
    original = transformers.AutoModelForCausalLM.from_config(kind(**sizes))
    model, ids = copy.deepcopy(original), torch.randint(1, 50, (2, N))
    compiled = torch.compile(model, backend=compile_graph)
    for each in (compiled, original):
        each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for found, own in zip(model.parameters(), original.parameters()):
        torch.testing.assert_close(found.grad, own.grad, rtol=1e-4, atol=1e-6)
    causal, grouped = name != "mistral", name == "llama"
    expected = {"is_causal": causal} | ({"enable_gqa": True} if grouped else {})
    assert [{key: options.get(key) for key in expected} for _, options in attentions] == [expected] * 2
