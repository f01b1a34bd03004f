"""Canonicalisation keeps the function and brings spellings to one; what it may not touch it leaves or refuses."""

import math

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from kfconvert.canonical.passes import canonicalise
from kfconvert.capture.tracer import trace
from kfconvert.graph.nodes import mark_weights
from kfconvert.graph.trees import arguments, aten
from kfconvert.inputs.example import ExampleCall
from kfconvert.matching.rewriter import rewrite
from kfconvert.region.live_tensors import LiveTensors
from kfconvert.region.region import CaptureError


class Function(nn.Module):
    """A module whose forward is a plain function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class OneArgument(Function):
    def forward(self, x):
        return self.function(x)


class TwoArguments(Function):
    def forward(self, x, y):
        return self.function(x, y)


def canonical_region(model, *inputs):
    region = trace(model.eval(), ExampleCall(inputs))
    mark_weights(region.graph, (*region.slots, *region.constants))
    canonicalise(region.graph)
    return region


def targets(region):
    return [node.target for node in region.graph.nodes if node.op == "call_function"]


def run(model, region, *inputs):
    return rewrite(region, (), LiveTensors(model, region)).run(list(inputs))


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


SPELLINGS = {
    "gelu_new": (gelu_new, aten.gelu.default),
    "gelu_fast": (gelu_fast, aten.gelu.default),
    "gelu_python": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), aten.gelu.default),
    "silu": (lambda x: x * torch.sigmoid(x), aten.silu.default),
    "hardswish": (lambda x: x * F.relu6(x + 3) / 6, aten.hardswish.default),
    "relu6_as_hardtanh": (lambda x: F.hardtanh(x, 0.0, 6.0), aten.relu6.default),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_written_out_activation_becomes_one_call(name):
    function, target = SPELLINGS[name]
    model, x = OneArgument(function), torch.randn(3, 5, dtype=torch.float64)
    region = canonical_region(model, x)
    assert targets(region) == [target]
    torch.testing.assert_close(run(model, region, x)[0], function(x), rtol=1e-7, atol=1e-7)


def test_a_constant_that_is_not_geluS_is_left_alone():
    model = OneArgument(lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))))
    assert aten.gelu.default not in targets(canonical_region(model, torch.randn(3, 5)))


# What a constant of GELU is written as, and whether it may stand for it in float32 and in float64.
CONSTANTS = {
    "exact": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), True, True),
    "ten digits": (lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))), True, True),
    "six digits": (lambda x: 0.5 * x * (1 + torch.tanh(0.797885 * (x + 0.044715 * x**3))), True, False),
    "seven digits": (lambda x: 0.5 * x * (1 + torch.erf(x / 1.414214)), True, False),
    "another half": (lambda x: 0.500001 * x * (1 + torch.erf(x / math.sqrt(2))), False, False),
    "another power": (lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3.00001))), False, False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_with_few_digits(name, dtype):
    function, *is_gelu = CONSTANTS[name]
    region = canonical_region(OneArgument(function), torch.randn(3, 5, dtype=dtype))
    assert (aten.gelu.default in targets(region)) == is_gelu[dtype is torch.float64]


def in_place_chain(x):
    y = x * 2
    y.add_(1)
    y.relu_()
    return y + 1


def in_place_through_a_view(x):
    y = x * 2
    first = y[0]
    y.relu_()
    return first + y[1]


def in_place_on_a_view(x):
    y = x * 2
    y.view(-1).relu_()
    return y


def result_and_written_value_both_used(x):
    y = x - 1
    z = y.relu_()
    return y * z


def on_one_of_several_results(x):
    values, indices = x.topk(2)
    values /= values.sum(-1, keepdim=True)
    return values * indices


def on_a_part_that_shares_memory(x):
    y = x * 2
    first, second = y.split([2, 3], -1)
    first.relu_()
    return y + first.sum() + second.sum()


def filled_by_slices(x):
    y = x.new_empty(x.shape[0], 8)
    y[:, 3:] = x.sin()
    y[:, :3] = x[:, 2:].cos()
    return y * 2


def filled_by_slices_and_written(x):
    y = torch.empty_like(x)
    part = x * 2
    y[:, :3] = part[:, :3]
    part.relu_()
    y[:, 3:] = part[:, 3:]
    return y + 1


def filled_by_a_filled_tensor(x):
    inner = x.new_empty(x.shape[0], 5)
    inner[:, :3] = x[:, :3].sin()
    inner[:, 3:] = x[:, 3:].cos()
    outer = x.new_empty(x.shape[0], 10)
    outer[:, :5] = inner
    inner.relu_()
    outer[:, 5:] = x
    return outer * 2 + inner.sum()


def filled_twice(x):
    y = torch.empty_like(x)
    y[:, :3] = x[:, :3].sin()
    first = y[:, 0] * 2
    y[:, 2:] = x[:, 2:].cos()
    return y + first[:, None]


def scattered(x):
    mask = torch.zeros_like(x)
    mask.scatter_(1, x.argsort()[:, :2], 1)
    return x * mask


def in_place_with_another_layout(x):
    """The functional masked_fill returns a contiguous tensor, of which the reshape would be a copy."""
    y = x.t() * 2
    y.masked_fill_(y > 1, 0)
    y.t().reshape(-1).add_(1)
    return y + 0


def several_tensors_in_place(x):
    parts = [x * 2, x.sin()]
    torch._foreach_add_(parts, 1.0)
    return parts[0] * parts[1]


def inverse_of_a_permutation(x):
    order = x[0].argsort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(5)
    return x[:, inverse]


@pytest.mark.parametrize(
    "function",
    [
        in_place_chain, in_place_through_a_view, in_place_on_a_view, result_and_written_value_both_used,
        on_one_of_several_results, on_a_part_that_shares_memory, inverse_of_a_permutation, filled_by_slices,
        filled_by_slices_and_written, filled_by_a_filled_tensor, filled_twice, scattered, in_place_with_another_layout,
        several_tensors_in_place,
    ],
)  # fmt: skip
def test_in_place_writes_keep_their_meaning(function):
    model, x = OneArgument(function), torch.randn(3, 5)
    region = canonical_region(model, x)
    torch.testing.assert_close(run(model, region, x)[0], function(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "function, before, after",
    [
        (in_place_chain, aten.relu_.default, aten.relu.default),
        (on_one_of_several_results, aten.div_.Tensor, aten.div.Tensor),
        (inverse_of_a_permutation, aten.empty_like.default, aten.zeros_like.default),
        (filled_by_slices, aten.copy_.default, aten.cat.default),
        (scattered, aten.scatter_.value, aten.scatter.value),
    ],
)
def test_in_place_writes_become_functional(function, before, after):
    region = canonical_region(OneArgument(function), torch.randn(3, 5))
    assert after in targets(region) and before not in targets(region)


def test_a_write_into_a_strided_view_stays_one_where_an_output_shows_it():
    x = torch.randn(3, 5)
    for after, stays in ((lambda y: y + 1, True), (lambda y: y[:2], True), (lambda y: y.softmax(-1), False)):
        region = canonical_region(OneArgument(lambda x, after=after: after((x * 2)[:, ::2].relu_())), x)
        assert (aten.relu_.default in targets(region)) is stays


def test_a_returned_tensor_keeps_its_strides():
    for write in (lambda y: y.masked_fill_(y > 1, 0), lambda y: y.tril_(), lambda y: y.cumsum_(0), lambda y: y.relu_()):
        model, x = OneArgument(lambda x, write=write: write(x.t() * 2)), torch.randn(3, 5)
        assert run(model, canonical_region(model, x), x)[0].stride() == (1, 5)


def test_half_written_with_float_keeps_its_dtype():
    model = OneArgument(lambda x: (x * 2).add_(torch.ones(5)))
    x = torch.randn(3, 5).half()
    assert run(model, canonical_region(model, x), x)[0].dtype is torch.float16


# Those that draw, and those that put other memory behind a tensor.
NOT_TRIED = ("bernoulli_ cauchy_ detach_ exponential_ geometric_ log_normal_ normal_ random_ requires_grad_ resize_ "
             "resize_as_ set_ uniform_").split()  # fmt: skip
IN_PLACE = [n for n in dir(torch.Tensor) if n[-1] == "_" != n[-2] and hasattr(aten, n) and n not in NOT_TRIED]


@pytest.mark.parametrize("number", [None, 2, 0.5, "tensor", "mask"])
def test_every_method_that_writes_in_place(number):
    x = torch.rand(3, 3) + 0.1
    args = {None: (), "tensor": (x,), "mask": (x > 0.5,)}.get(number, (number,))

    def works(name):
        try:
            return getattr(x * 2, name)(*args) is not None
        except (TypeError, RuntimeError, IndexError):
            return False

    names = [name for name in IN_PLACE if works(name)]
    assert len(names) > 20

    def write(x):
        written = [x * 2 for _ in names]
        results = [1 - getattr(y, name)(*args) for name, y in zip(names, written)]
        return results, written, [y.mean() for y in written]

    model = OneArgument(write)
    found = run(model, canonical_region(model, x), x)
    torch.testing.assert_close(found, tuple(v for group in write(x) for v in group), rtol=0, atol=0, equal_nan=True)


class CountsCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x * self.calls


@pytest.mark.parametrize("model", [nn.ReLU(inplace=True), CountsCalls()], ids=["argument", "buffer"])
def test_writing_to_an_argument_or_buffer_is_refused(model):
    with pytest.raises(CaptureError, match="writes in place|side effect"):
        canonical_region(model, torch.randn(3, 5))


def test_conv1d_over_parts_of_rows_is_none():
    """As with one projection for all heads: the rows of the product are not those of the input."""

    class PerHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

        def forward(self, x):
            return torch.addmm(self.bias, x.reshape(-1, 4), self.weight).reshape(x.shape)

    model, x = PerHead(), torch.randn(2, 3, 8)
    region = canonical_region(model, x)
    assert aten.addmm.default in targets(region)
    torch.testing.assert_close(run(model, region, x)[0], model(x))


def test_conv1d_of_gpt2_is_a_linear():
    model, x = Conv1D(6, 4), torch.randn(2, 3, 4)
    region = canonical_region(model, x)
    assert targets(region) == [aten.t.default, aten.linear.default]
    torch.testing.assert_close(run(model, region, x)[0], model(x))


def test_dropout_and_other_identities_vanish():
    model = nn.Sequential(nn.Dropout(0.5), OneArgument(lambda x: x[:].to(torch.float32) + 1), nn.Dropout2d())
    assert targets(canonical_region(model, torch.randn(3, 5, 2, 2))) == [aten.add.Tensor]
    in_place = nn.Sequential(nn.ReLU(), nn.Dropout(inplace=True), nn.Dropout2d(inplace=True), nn.AlphaDropout())
    assert targets(canonical_region(in_place, torch.randn(3, 5, 2, 2))) == [aten.relu.default]


EQUATIONS = ["bnhd,bmhd->bhnm", "bhnm,bmhe->bnhe", "ij,jk->ik", "ij,jk->ki", "abc,acd->abd"]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_of_two_stacks_is_a_matmul(equation):
    sizes = {label: 2 + index for index, label in enumerate(sorted(set(equation) - set(",->")))}
    left, right = ([sizes[label] for label in labels] for labels in equation.partition("->")[0].split(","))
    model = TwoArguments(lambda x, y: torch.einsum(equation, x, y))
    x, y = torch.randn(left), torch.randn(right)
    region = canonical_region(model, x, y)
    assert aten.matmul.default in targets(region) and aten.einsum.default not in targets(region)
    torch.testing.assert_close(run(model, region, x, y)[0], model(x, y))


@pytest.mark.parametrize("sizes", [((4, 1), (6, 5)), ((4, 6), (1, 5)), ((4, 1), (1, 5))], ids=str)
def test_einsum_expands_an_index_of_one_entry(sizes):
    model, (x, y) = TwoArguments(lambda x, y: torch.einsum("ij,jk->ik", x, y)), map(torch.randn, sizes)
    torch.testing.assert_close(run(model, canonical_region(model, x, y), x, y)[0], model(x, y))


OTHER_EQUATIONS = ["ij,jk->i", "ij,ij->ij", "ij,kl->ijkl", "iij,jk->ik", "...j,jk->...k", "ijk,kjl->il"]


@pytest.mark.parametrize("equation", OTHER_EQUATIONS)
def test_other_einsums_are_left_alone(equation):
    sizes = {label: 2 + index for index, label in enumerate("ijkl")}
    left, right = equation.replace("...", "i").partition("->")[0].split(",")
    x, y = (torch.randn([sizes[label] for label in labels]) for labels in (left, right))
    region = canonical_region(TwoArguments(lambda x, y: torch.einsum(equation, x, y)), x, y)
    assert aten.einsum.default in targets(region)


@pytest.mark.parametrize(
    "shown, dropped",
    [
        (lambda x: torch.arange(5) >= 0, True),
        (lambda x: torch.arange(5) >= 1, False),
        (lambda x: torch.arange(5) + 1 >= 1, True),
        (lambda x: torch.arange(5) + 1 >= 2, False),
        (lambda x: x[0] + 1 >= 0, False),
    ],
    ids=["from 0", "from 1", "moved", "moved too little", "of values"],
)
def test_only_an_additive_mask_that_is_zero_everywhere_is_dropped(shown, dropped):
    def add_mask(x):
        everywhere = shown(x)[None, :].expand(x.shape[0], -1)
        return torch.relu(x.sin() + torch.where(everywhere, torch.tensor(0.0), -1e9))

    model, x = OneArgument(add_mask), torch.randn(3, 5)
    region = canonical_region(model, x)
    assert (targets(region) == [aten.sin.default, aten.relu.default]) is dropped
    torch.testing.assert_close(run(model, region, x)[0], model(x))


def zeros_like(x):
    shown = (torch.arange(x.shape[-1]) >= 0)[None, :].expand(x.shape[0], -1)
    return torch.where(shown, torch.tensor(0.0), -1e9)


def returned_twice(x):
    y = x.sin()
    return y, y + zeros_like(x)


def written_later(x):
    y = x.sin() + zeros_like(x)
    y[:, 1:].mul_(2)
    return y


@pytest.mark.parametrize("function", [lambda x: x + zeros_like(x), returned_twice, written_later])
def test_a_sum_with_a_zero_mask_stays_a_tensor_of_its_own(function):
    model, x = OneArgument(function), torch.randn(3, 5)
    region = canonical_region(model, x)
    assert aten.add.Tensor in targets(region)


def test_constants_are_sought_in_deep_products():
    """In time that does not double with each of them."""

    def powers(x):
        y = x.sum()
        for _ in range(64):
            y = y * y
        return y

    assert targets(canonical_region(OneArgument(powers), torch.randn(3, 5))).count(aten.mul.Tensor) == 64


HELD = torch.tensor(2.0)
NUMBERS = {
    "tensor": (lambda x: x * torch.tensor(2.0), True),
    "left": (lambda x: torch.tensor(2.0) * x, True),
    "full": (lambda x: x / torch.full((), 2.0), True),
    "root": (lambda x: x / torch.sqrt(torch.tensor(4)), True),
    "product": (lambda x: x / torch.sqrt(torch.tensor(2.0) * 2), True),
    "cast": (lambda x: x / torch.tensor(2.0, dtype=torch.float64).to(x.dtype), True),
    "held by Python": (lambda x: x * HELD, False),
    "promotes": (lambda x: x * torch.tensor([2.0], dtype=torch.float64), False),
    "broadcasts": (lambda x: x * torch.tensor([[[2.0]]]), False),
}


@pytest.mark.parametrize("function, is_number", NUMBERS.values(), ids=NUMBERS.keys())
def test_a_factor_that_is_always_the_same_number_becomes_one(function, is_number):
    model, x = OneArgument(function), torch.randn(3, 5)
    region = canonical_region(model, x)
    product = next(node for node in region.graph.nodes if node.target in (aten.mul.Tensor, aten.div.Tensor))
    assert (product.args[1] == 2.0) is is_number
    torch.testing.assert_close(run(model, region, x)[0], model(x))


@pytest.mark.parametrize("dtype", [None, torch.int32, torch.int64])
def test_a_tensor_that_the_forward_makes_of_numbers_is_no_argument_that_it_writes_to(dtype):
    """``torch.tensor`` detaches it in place, also after a conversion to a dtype and device."""
    rows = numpy.array([2, 0])
    model, x = OneArgument(lambda x: x[torch.tensor(rows, dtype=dtype, device=x.device)]), torch.randn(3, 5)
    region = canonical_region(model, x)
    assert aten.detach_.default not in targets(region)
    torch.testing.assert_close(run(model, region, x)[0], model(x))


def masked_attention(least, dtype):
    def attend(x):
        rows = torch.arange(x.shape[-2], dtype=dtype)
        mask = (rows >= least)[None, None, :, None].expand(x.shape[0], 1, x.shape[-2], x.shape[-2])
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    return attend


@pytest.mark.parametrize("least, dtype, dropped", [(0, None, True), (1, None, False), (0, torch.int8, False)])
def test_only_a_mask_that_is_true_everywhere_is_dropped(least, dtype, dropped):
    model, x = OneArgument(masked_attention(least, dtype)), torch.randn(2, 2, 4, 8)
    region = canonical_region(model, x)
    attention = next(n for n in region.graph.nodes if n.target is aten.scaled_dot_product_attention.default)
    assert (len(attention.args) == 3 and attention.kwargs["attn_mask"] is None) is dropped
    torch.testing.assert_close(run(model, region, x)[0], model(x), equal_nan=True)


def step(shift):
    """Attention of the last ``1 + shift`` of the positions, with the mask that a trace of transformers writes."""

    def attend(q, keys):
        length = keys.shape[-2]
        seen = (
            torch.arange(length)[None, None, None, :] <= (torch.arange(1) + (length - 1 - shift))[None, None, :, None]
        )
        keys = keys[:, :, None].expand(-1, -1, 2, -1, -1).reshape(keys.shape[0], -1, length, keys.shape[-1])
        return F.scaled_dot_product_attention(q, keys, keys, attn_mask=seen.expand(keys.shape[0], -1, -1, -1))

    return attend


@pytest.mark.parametrize("shift, dropped", [(0, True), (1, False)])
def test_the_last_of_some_positions_sees_all_whatever_their_number_and_repeats_no_heads(shift, dropped):
    model, q, keys = TwoArguments(step(shift)).eval(), torch.randn(2, 4, 1, 8), torch.randn(2, 2, 6, 8)
    region = trace(model, ExampleCall((q, keys)), {"batch": [(0, 0), (1, 0)], "length": [(1, 2)]})
    canonicalise(region.graph)
    attention = next(n for n in region.graph.nodes if n.target is aten.scaled_dot_product_attention.default)
    assert (arguments(attention)[3] is None) is dropped
    assert bool(attention.kwargs.get("enable_gqa")) is dropped
    for length in (6, 9):
        given = torch.randn(3, 4, 1, 8), torch.randn(3, 2, length, 8)
        torch.testing.assert_close(run(model, region, *given)[0], model(*given))


def test_one_head_of_queries_reads_repeated_heads():
    model, q, keys = TwoArguments(step(0)).eval(), torch.randn(2, 1, 1, 8), torch.randn(2, 2, 6, 8)
    region = canonical_region(model, q, keys)
    (attention,) = region.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert not attention.kwargs.get("enable_gqa")
    torch.testing.assert_close(run(model, region, q, keys)[0], model(q, keys))


def test_casts_to_the_dtype_of_another_tensor():
    def function(x):
        wide = x.float().tanh()
        return wide.type_as(x) + wide.to(x)

    for dtype, casts in ((torch.bfloat16, 3), (torch.float32, 0)):
        model, x = OneArgument(function), torch.randn(3, 4).to(dtype)
        region = canonical_region(model, x)
        assert targets(region) == [
            *[aten.to.dtype] * (casts > 0),
            aten.tanh.default,
            *[aten.to.dtype] * (casts - 1),
            aten.add.Tensor,
        ]
        assert torch.equal(run(model, region, x)[0], function(x))


def test_what_follows_from_a_size_that_the_trace_has_fixed_is_a_number():
    def function(x, mask):
        rows, columns = mask.shape  # both are free until the sum fixes the second
        halves = mask.reshape(rows, columns // 2, 2) * columns * torch.sym_sqrt(columns) * (columns**-0.5)
        return halves + (x + mask).reshape(rows, 4, 2) * (rows * columns)

    model, inputs = TwoArguments(function), (torch.randn(3, 8), torch.ones(3, 8, dtype=torch.int64))
    region = canonical_region(model, *inputs)
    sizes = [node for node in region.graph.nodes if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))]
    assert sizes and not any(node.meta["val"].node.expr.is_number for node in sizes)
    for rows in (2, 5):
        given = torch.randn(rows, 8), torch.randint(9, (rows, 8))
        assert torch.equal(run(model, region, *given)[0], function(*given))
