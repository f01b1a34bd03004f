"""FusedTransformerLayer against torch.nn.TransformerEncoderLayer: weights, masks, modes, dtypes."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.accuracy import assert_as_accurate
from torch import nn

from kfconvert.modules import FusedTransformerLayer

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
KINDS = [(activation, norm_first) for activation in ("relu", "gelu") for norm_first in (False, True)]


def layers(activation="gelu", norm_first=False, dropout=0.0, device="cpu", dtype=torch.float32, **options):
    """(the fused layer, torch's) with one set of weights, biases and norms that matter among them."""
    options = {"batch_first": True, **options, "device": device, "dtype": dtype}
    fused = FusedTransformerLayer(32, 4, 48, dropout, activation, norm_first, **options)
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    plain = nn.TransformerEncoderLayer(32, 4, 48, dropout, activation, norm_first=norm_first, **options)
    assert list(plain.state_dict()) == list(fused.state_dict())
    plain.load_state_dict(fused.state_dict())
    return fused, plain


def exactly(plain, x):
    """With a gradient, without which torch's layer on CUDA has the GELU by tanh."""
    with torch.enable_grad():
        return copy.deepcopy(plain).double()(x.double()).detach()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "norm_first"), KINDS)
def test_as_accurate_as_torch(device, dtype, activation, norm_first):
    fused, plain = layers(activation, norm_first, device=device, dtype=dtype)
    for batch_first in (True, False):
        for layer in (fused, plain):
            layer.self_attn.batch_first = batch_first
        x = torch.randn(3, 7, 32, device=device, dtype=dtype)
        for training in (True, False):
            fused.train(training), plain.train(training)
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    assert_as_accurate(fused(x), plain(x), exactly(plain, x))
    x = torch.randn(7, 32, device=device, dtype=dtype)
    assert_as_accurate(fused(x), plain(x), exactly(plain, x))


@pytest.mark.parametrize(("activation", "norm_first"), KINDS)
def test_gradients(device, activation, norm_first):
    fused, plain = layers(activation, norm_first, device=device, dtype=torch.float64)
    x = torch.randn(2, 5, 32, device=device, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    for training in (True, False):
        found = []
        for layer in (fused, plain):
            layer.train(training)
            found.append(torch.autograd.grad((layer(x) * weight).sum(), [x, *layer.parameters()]))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_masks(device, norm_first, training):
    fused, plain = layers("relu", norm_first, device=device)
    x = torch.randn(3, 6, 32, device=device)
    padding = torch.zeros(3, 6, dtype=torch.bool, device=device)
    padding[1, 4:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(6, device=device)
    scores = torch.randn(6, 6, device=device).fill_diagonal_(0.0)  # no row is masked as a whole: it would be NaN
    fused.train(training), plain.train(training)
    for masks in (
        {"src_key_padding_mask": padding}, {"src_mask": causal}, {"src_mask": causal, "is_causal": True},
        {"src_mask": scores}, {"src_mask": scores > 1, "src_key_padding_mask": padding},
    ):  # fmt: skip
        with torch.no_grad():
            found = torch.nan_to_num(fused(x, **masks))
            # torch's fast path takes a mask of floats for one of booleans.
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                want = torch.nan_to_num(plain(x, **masks))
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
        shown = ~padding if "src_key_padding_mask" in masks else slice(None)
        torch.testing.assert_close(found[shown], want[shown])


def test_every_dropout_is_there(device):
    """One at a time with certainty: the results are those of torch's layer without what is dropped."""
    for name in ("dropout", "dropout1", "dropout2"):
        for norm_first in (False, True):
            fused, plain = layers("relu", norm_first, 0.0, device)
            for layer in (fused, plain):
                getattr(layer, name).p = 1.0
            x = torch.randn(2, 4, 32, device=device)
            torch.testing.assert_close(fused(x), plain(x))


@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_that_drops_nothing_keeps_the_biases(device, norm_first):
    fused, plain = layers("gelu", norm_first, 1e-12, device)
    x = torch.randn(3, 7, 32, device=device)
    torch.testing.assert_close(fused.train()(x), plain.train()(x), rtol=1e-4, atol=1e-5)


def test_without_biases_and_other_eps(device):
    for norm_first in (False, True):
        for dropout in (0.0, 1.0):
            fused, plain = layers("gelu", norm_first, dropout, device, bias=False, layer_norm_eps=0.1)
            for layer in (fused, plain):
                layer.self_attn.dropout = 0.0  # attention kernels return NaN for a probability of 1
            x = torch.randn(2, 4, 32, device=device)
            torch.testing.assert_close(fused(x), plain(x))


def test_another_activation_later(device):
    fused, plain = layers(device=device)
    fused.activation = plain.activation = F.silu
    x = torch.randn(2, 4, 32, device=device)
    torch.testing.assert_close(fused(x), plain(x))


@pytest.mark.parametrize("norm_first", [False, True])
def test_in_an_encoder(device, norm_first):
    """With nested tensors, which torch's encoder makes of padded sequences."""
    fused, plain = layers("relu", norm_first, device=device)
    x, padding = torch.randn(2, 6, 32, device=device), torch.tensor([[False] * 6, [False] * 4 + [True] * 2]).to(device)
    encoders = [nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval() for layer in (fused, plain)]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found, want = (encoder(x, src_key_padding_mask=padding) for encoder in encoders)
        torch.testing.assert_close(found[~padding], want[~padding])


def test_copies_and_compilers(device):
    fused, plain = layers(device=device)
    x = torch.randn(2, 6, 32, device=device)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        torch.testing.assert_close(other(x), plain(x))
    torch.testing.assert_close(torch.compile(fused, backend="aot_eager")(x), plain(x))
    torch.compiler.reset()


def test_defaults_are_those_of_torch():
    torch.manual_seed(1)
    fused = FusedTransformerLayer(16, 2)
    torch.manual_seed(1)
    plain = nn.TransformerEncoderLayer(16, 2)
    assert all(torch.equal(*pair) for pair in zip(fused.parameters(), plain.parameters()))
    assert fused.dropout.p == plain.dropout.p and fused.linear1.out_features == plain.linear1.out_features
    assert isinstance(fused, nn.TransformerEncoderLayer)
    fused.eval(), plain.eval()
    x = torch.randn(5, 3, 16)
    torch.testing.assert_close(fused(x), plain(x))


def test_errors():
    with pytest.raises(ValueError, match="^activation must be 'relu' or 'gelu', got 'swish'$"):
        FusedTransformerLayer(16, 2, activation="swish")
    # torch's layer has layer_norm_eps in this place
    with pytest.raises(TypeError, match="^kfconvert::FusedTransformerLayer: norm_first must be True or False"):
        FusedTransformerLayer(16, 2, 32, 0.1, "relu", 1e-5)
    with pytest.raises(TypeError, match="positional arguments"):
        FusedTransformerLayer(16, 2, 32, 0.1, "relu", True, 1e-5)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_submodules_that_are_more_than_their_weights(device, batch_first, training):
    """Hooks, classes of their own, other norms and adapters are those of torch's layer."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def hooked(layer):
        layer.linear1.register_forward_hook(lambda module, inputs, output: output * 3)

    def replaced(layer):
        layer.linear2.__class__ = Doubled

    def other_norm(layer):
        layer.norm1 = nn.Identity()

    def patched(layer):
        layer.norm2.forward = lambda x: x * 2

    # In evaluation torch's own layer asks its norms for their eps before anything else.
    for change in (hooked, replaced, patched, *([other_norm] if training else [])):
        fused, plain = layers(batch_first=batch_first, device=device)
        for layer in (fused, plain):
            layer.train(training)
            change(layer)
        x = torch.randn(2, 4, 32, device=device)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), plain(x))


def test_a_dropout_in_another_mode_than_the_layer(device):
    fused, _ = layers(dropout=0.5, batch_first=False, device=device)
    x = torch.randn(2, 4, 32, device=device)
    with torch.no_grad():
        fused.eval()
        fused.dropout1.train()
        assert not torch.equal(fused(x), fused(x))
        fused.train()
        for dropout in (fused.dropout, fused.dropout1, fused.dropout2):
            dropout.eval()
        fused.self_attn.dropout = 0.0
        assert torch.equal(fused(x), fused(x))
