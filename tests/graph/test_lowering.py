"""Every binding of the lowering table computes what its ATen overload does, for arguments in schema order."""

import pytest
import torch

from kfconvert.graph.bindings import _BINDINGS
from kfconvert.graph.trees import aten

X = torch.randn(2, 3, 4, 4)
ROWS = torch.randn(5, 4)
QUERY = torch.randn(1, 2, 4, 8)
SAMPLES = {
    aten.add.Tensor: ((X, X), {"alpha": 2}),
    aten.sub.Tensor: ((X, 1.5), {}),
    aten.mul.Tensor: ((X, 2), {}),
    aten.div.Tensor: ((X, X), {}),
    aten.relu.default: ((X,), {}),
    aten.tanh.default: ((X,), {}),
    aten.sigmoid.default: ((X,), {}),
    aten.gelu.default: ((X,), {"approximate": "tanh"}),
    aten.silu.default: ((X,), {}),
    aten.linear.default: ((ROWS, torch.randn(3, 4), torch.randn(3)), {}),
    aten.matmul.default: ((ROWS, ROWS.t()), {}),
    aten.conv2d.default: ((X, torch.randn(6, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 3), {}),
    aten.layer_norm.default: ((ROWS, [4], torch.randn(4), None, 1e-3, False), {}),
    aten.batch_norm.default: ((X, None, None, torch.rand(3), torch.rand(3), False, 0.1, 1e-5, False), {}),
    aten.embedding.default: ((ROWS, torch.tensor([[1, 3]]), 1), {}),
    aten.scaled_dot_product_attention.default: ((QUERY, QUERY, QUERY), {"is_causal": True, "scale": 0.3}),
    aten.max_pool2d.default: ((X, [2, 2], [1, 1], [1, 1], [1, 1], True), {}),
    aten.avg_pool2d.default: ((X, [2, 2], [1, 1], [1, 1], False, False), {}),
    aten.adaptive_avg_pool2d.default: ((X, [1, 1]), {}),
    aten.flatten.using_ints: ((X, 1), {}),
    aten.reshape.default: ((X, [2, -1]), {}),
    aten.transpose.int: ((X, 1, -1), {}),
    aten.permute.default: ((X, [0, 2, 3, 1]), {}),
    aten.unsqueeze.default: ((X, -1), {}),
    aten.squeeze.dim: ((X[:, :1], 1), {}),
    aten.select.int: ((X, 1, 2), {}),
    aten.expand.default: ((X[:, :1], [-1, 3, -1, -1]), {}),
    aten.gather.default: ((ROWS, 1, torch.tensor([[0], [1]])), {}),
    aten.mean.dim: ((X, [2, 3], True), {"dtype": torch.float64}),
    aten.t.default: ((ROWS,), {}),
    aten.sym_size.int: ((X, 1), {}),
}


def test_every_binding_has_a_sample():
    assert set(SAMPLES) == set(_BINDINGS)


@pytest.mark.parametrize("overload", SAMPLES, ids=str)
def test_binding_computes_what_the_overload_does(overload):
    args, kwargs = SAMPLES[overload]
    torch.testing.assert_close(_BINDINGS[overload](*args, **kwargs), overload(*args, **kwargs), rtol=0, atol=0)
