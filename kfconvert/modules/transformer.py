"""A transformer encoder layer with the parameters of ``torch.nn.TransformerEncoderLayer``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import bias_dropout_add, ffn_block, layer_norm_act
from ..ops.arguments import checked
from .base import is_of

_NAMES = {F.relu: "relu", F.gelu: "gelu"}


class FusedTransformerLayer(nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer`` with fused sums, norms and activations.

    Parameters and their names, ``state_dict``, masks and results match torch's layer, so each can load the weights of
    the other. Torch's forward runs if a submodule has hooks, an overridden forward, or another class. There is one
    difference: float masks are added to the scores also in eval mode, in which torch treats them as boolean. Library
    calls compute the projections (q, k and v in one product) and attention (``torch.nn.MultiheadAttention``). On the
    CPU, in eval mode with ``batch_first`` and without gradients, torch's operator computes the whole layer. This
    package computes ``act(x W1^T + b1)`` with the activation in the product's epilogue, ``layer_norm(x + residual)`` in
    one pass, and in training ``dropout(x + bias) + residual`` in one pass.

    Args:
        d_model, nhead, dim_feedforward: widths, and the number of heads, which divides d_model.
        dropout: probability in training, as in torch's layer: of attention weights, of hidden values and of the
            results of both blocks.
        activation: "relu" or "gelu" (exact).
        norm_first: whether the norms come before the blocks, else after the sums.
        layer_norm_eps, batch_first, bias, device, dtype: as in torch's layer, but keyword-only, because torch's order
            differs. Without ``batch_first``, x is (N, batch, d_model).

    Raises:
        TypeError: an argument has another type, such as torch's layer_norm_eps in place of norm_first.
        ValueError: another activation.
    """

    @checked
    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        norm_first: bool = False,
        *,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        if activation not in ("relu", "gelu"):
            raise ValueError(f"activation must be 'relu' or 'gelu', got {activation!r}")
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias,
            device, dtype,
        )  # fmt: skip

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Computes the layer. src: (N, d_model), (N, batch, d_model), or (batch, N, d_model) with ``batch_first``; the
        result has the same shape. The masks and ``is_causal`` are as in torch's layer."""
        if self._is_one_operator(src, src_mask) or not self._is_usual():
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)

        def attended(x):
            masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
            return self.self_attn(x, x, x, need_weights=False, **masks)[0]

        if self.norm_first:
            y, x = self._summed(attended(self.norm1(src)), None, src, self.dropout1, self.norm2)
            return self._added(*self._fed_forward(y), x)
        x, _ = self._summed(attended(src), None, src, self.dropout1, self.norm1)
        return self._summed(*self._fed_forward(x), x, self.dropout2, self.norm2)[0]

    def _is_one_operator(self, src, mask):
        """Whether torch's forward is faster. Only torch's forward accepts nested tensors of nn.TransformerEncoder."""
        # On CUDA, torch's operator computes GELU with tanh. It treats every nonzero element of a mask as masked.
        inference = not (self.training or torch.is_grad_enabled()) and (mask is None or mask.dtype is torch.bool)
        return src.is_nested or (inference and src.is_cpu and self.self_attn.batch_first)

    def _is_usual(self):
        """Whether this layer may read the weights of its submodules instead of calling their forwards."""
        kinds = {nn.Linear: (self.linear1, self.linear2), nn.LayerNorm: (self.norm1, self.norm2),
                 nn.Dropout: (self.dropout, self.dropout1, self.dropout2)}  # fmt: skip
        return self.activation in _NAMES and all(is_of(m, kind) for kind, modules in kinds.items() for m in modules)

    def _fed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the result of the feed-forward block, and its last bias if it is not yet added."""
        first, second = self.linear1, self.linear2
        bias = None if self._drops(self.dropout2) else second.bias
        weights = first.weight, first.bias, second.weight, bias
        y = ffn_block(x, *weights, _NAMES[self.activation], self.dropout.p, self.dropout.training)
        return y, None if bias is second.bias else second.bias

    def _added(self, y, bias, x):
        return bias_dropout_add(y, bias, x, self.dropout2.p) if self._drops(self.dropout2) else y + x

    def _summed(self, y, bias, x, dropout, norm):
        """Returns (norm(sum), sum) with the sum ``dropout(y + bias) + x``."""
        residual = x
        if self._drops(dropout):
            y, residual = bias_dropout_add(y, bias, x, dropout.p), None
        options = {"residual": residual, "return_sum": True}
        return layer_norm_act(y, norm.normalized_shape, norm.weight, norm.bias, norm.eps, **options)

    def _drops(self, dropout):
        return dropout.training and dropout.p > 0
