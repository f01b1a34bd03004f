"""Sample calls of every public operator with tensors. The tests of all operators run them in each dtype and layout.

A new operator needs an entry in SAMPLES; the first call of an entry is its ordinary one.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from kfconvert import ops
from support import selection

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "transposed", "strided", "misaligned", "channels_last", "mixed")
DTYPE = object()  # in a call: the dtype of the run
WIDE = object()  # as the kind of a tensor: float32, or float64 if that is the dtype of the run


@dataclass(frozen=True)
class T:
    """A tensor of normal numbers, positive or with spread and mean; for ``kind`` int or bool, of such values.

    kind: None for the dtype of the run. high: the bound of integers. learned: whether it has a gradient.
    """

    shape: tuple[int, ...]
    spread: float = 1.0
    mean: float = 0.0
    positive: bool = False
    kind: Any = None
    high: int = 5
    learned: bool = True

    def made(self, dtype, device, layout):
        if self.kind == torch.bool:
            return torch.rand(self.shape, device=device) > 0.3
        if isinstance(self.kind, torch.dtype):
            low = -self.high if self.kind.is_signed and self.kind.itemsize == 1 else 0
            return torch.randint(low, self.high, self.shape, device=device, dtype=self.kind)
        if self.kind is WIDE:
            dtype = torch.float64 if dtype == torch.float64 else torch.float32
        x = torch.randn(self.shape, device=device) * self.spread + self.mean
        return laid_out((x.abs() + 0.2 if self.positive else x).to(dtype), layout)


def laid_out(x, layout):
    """Returns x in a memory layout; one that x cannot have leaves it contiguous."""
    if layout == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if layout == "strided" and x.dim() > 0:
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "misaligned":
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    if layout == "channels_last" and x.dim() in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "channels_last" and x.dim() > 1:  # rows of a wider tensor
        return torch.cat((x, x), -1)[..., : x.shape[-1]]
    return x


class Call(NamedTuple):
    """Arguments of a call.

    has_gradient: whether the definition has one of the same accuracy.
    factor: how many times the usual error is allowed.
    is_rounded: for half types, compare with the rounded float64 result: plain ATen overflows, or has no such call.
    summand: the size of numbers whose difference, a gradient, is 0 for all weights of the outputs.
    """

    args: tuple
    kwargs: dict[str, Any]
    has_gradient: bool = True
    factor: float = 1.0
    is_rounded: bool = False
    summand: float = 0.0

    def made(self, dtype, device, layout="contiguous"):
        """Returns a Given: the arguments in ``dtype``. "mixed" gives each tensor another layout."""
        layouts = iter([layout] * 20 if layout != "mixed" else LAYOUTS[1:5] * 5)

        def value(given):
            if given is DTYPE:
                return dtype
            return given.made(dtype, device, next(layouts)) if isinstance(given, T) else given

        args = [value(each) for each in self.args]
        kwargs = {name: value(each) for name, each in self.kwargs.items()}
        given = (*self.args, *self.kwargs.values())
        made = (*args, *kwargs.values())
        leaves = [x for x, t in zip(made, given) if isinstance(t, T) and t.learned and x.is_floating_point()]
        return Given(args, kwargs, leaves if self.has_gradient else [])


@dataclass
class Given:
    """The arguments of one call, and those of its tensors that have gradients."""

    args: list
    kwargs: dict[str, Any]
    leaves: list[torch.Tensor] = field(default_factory=list)

    def mapped(self, function):
        """Returns the arguments after ``function`` of every tensor and dtype."""

        def value(given):
            return function(given) if isinstance(given, (torch.Tensor, torch.dtype)) else given

        values = {id(x): value(x) for x in (*self.args, *self.kwargs.values())}
        args = [values[id(x)] for x in self.args]
        kwargs = {name: values[id(x)] for name, x in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs, leaves=[values[id(x)] for x in self.leaves])

    def in_float64(self):
        """On the CPU: ATen's hardswish on CUDA rounds 1/6 to float32 even in float64."""

        def widened(x):
            if isinstance(x, torch.dtype):
                return torch.float64
            return x.detach().cpu().double().contiguous() if x.is_floating_point() else x.cpu()

        return self.mapped(widened)

    def contiguous(self):
        """For plain ATen, whose backward of some norms is wrong for other layouts."""
        return self.mapped(lambda x: x.detach().contiguous() if isinstance(x, torch.Tensor) else x)

    def run(self, function):
        outputs = function(*self.args, **self.kwargs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def differentiated(self, function, layout="contiguous", change=None):
        """Returns the outputs, and the gradients of the leaves for other weights of every element of the outputs.

        change: a function of the weights of an output, before they are laid out.
        """
        for leaf in self.leaves:
            leaf.requires_grad_()
        outputs = self.run(function)
        recorded = [y for y in outputs if y.requires_grad]
        if not (self.leaves and recorded):
            return [y.detach() for y in outputs], []
        weights = [weights_of(y, layout, change) for y in recorded]
        found = torch.autograd.grad(recorded, self.leaves, weights, allow_unused=True)
        return [y.detach() for y in outputs], list(found)


def weights_of(y, layout, change=None):
    """The gradient of y: the same numbers, exactly, for every dtype and device; ones for a fake tensor."""
    if layout == "ones":
        return torch.ones_like(y)
    weights = _numbers(y.numel()).to(y.device, y.dtype).view(y.shape)
    return laid_out(weights if change is None else change(weights), layout)


@functools.lru_cache(maxsize=8)
def _numbers(count):
    return torch.arange(count, dtype=torch.float64).mul(1.7).cos().mul(64).round().div(64)


def runs(number, device):
    """(dtype, layout) of the sample with this number: two of the product, or all with --exhaustive; more on a GPU."""
    if selection.EXHAUSTIVE:
        return [(dtype, layout) for dtype in DTYPES for layout in LAYOUTS]
    places = range(4) if device == "cuda" else (0, 2)
    return [(DTYPES[(number + place) % 4], LAYOUTS[(number + number // 6 + place) % 6]) for place in places]


def t(*shape, **options):
    return T(shape, **options)


def call(*args, has_gradient=True, factor=1.0, is_rounded=False, summand=0.0, **kwargs):
    return Call(args, kwargs, has_gradient, factor, is_rounded, summand)


def each(activations=tuple(ops.ACTIVATIONS)):
    return enumerate(activations)


def ids(high, *shape, kind=torch.int64):
    return T(shape, kind=kind, high=high, learned=False)


def statistics(channels, kind=None):
    return t(channels, learned=False, kind=kind), t(channels, positive=True, learned=False, kind=kind)


PAIRS = [
    ((5, 7, 40), (5, 7, 40)), ((5, 7, 40), (40,)), ((40,), (5, 7, 40)), ((6, 1), (1, 33)), ((2, 8, 4, 6), (8, 1, 1)),
    ((2, 8, 4, 6), (2, 8, 1, 1)), ((2, 1, 4, 1), (8, 1, 6)), ((2, 3, 2, 3, 2, 3, 2), (2, 1, 2, 1, 2, 1, 2)),
    ((17,), ()), ((), ()), ((3, 70_001), (3, 1)), ((0, 8), (8,)), ((4, 1), (4, 0)), ((33, 1), (33, 1)),
]  # fmt: skip
# (shape, dim) of tensors with a number for each channel
CHANNELS = [
    ((5, 33), -1), ((8,), 0), ((3, 70_001), 1), ((2, 8, 4, 6), 1), ((2, 7, 3, 5), 1), ((4, 6, 9), 0), ((0, 8), 1),
    ((700, 24), 1), ((9, 11, 7, 3), 1), ((5000, 3), -1), ((300, 1), 1), ((2, 0, 4), 1), ((6, 10, 14), 2),
]  # fmt: skip
# Every length of rows in the launch table of CUDA, and lengths around them that are read element by element.
LENGTHS = [
    96, 1, 2, 7, 8, 31, 64, 65, 128, 129, 257, 384, 512, 768, 1000, 1024, 1025, 2048, 3072, 4096, 8192, 10000, 40000,
]  # fmt: skip
# (shape, groups): on CUDA, rows in registers, in packs and element by element, of many pieces and of few, with threads
# to spare; then rows too long for them, of few long channels and of many short ones.
GROUPS = [
    ((2, 6, 5), 3), ((2, 12), 3), ((2, 6, 5), 6), ((2, 6, 5), 1), ((3, 64), 2), ((5, 16, 2, 2), 4), ((2, 6, 4, 8), 3),
    ((2, 64, 7, 7), 4), ((2, 64, 14, 14), 8), ((3, 192, 16, 16), 32), ((2, 256, 16, 16), 8), ((2, 3, 1000), 3),
    ((2, 4, 8192), 4), ((2, 4, 3, 4, 8), 2), ((2, 260, 16), 1), ((2, 6000), 1), ((2, 512, 8, 8), 1),
    ((1, 8, 33, 65), 2), ((2, 16, 64, 64), 4), ((2, 2, 20000), 1), ((2, 4, 9999), 4), ((0, 4, 3, 3), 2),
]  # fmt: skip
# (shape of x, of a residual that repeats)
REPEATED = [((2, 3, 8), (3, 8)), ((2, 3, 8), (1, 3, 8)), ((2, 3, 8), (1, 1, 8)), ((4, 5, 1, 8), (1, 8)), ((3, 8), (8,))]
REDUCED = [
    ((5, 33), -1), ((), None), ((), 0), ((1,), 0), ((7,), None), ((1000,), 0), ((5, 7), None), ((5, 7), 0),
    ((300, 8), 1), ((300, 33), -1), ((70, 64), -1), ((70, 65), -1), ((9, 768), -1), ((9, 1025), -1),
    ((3, 4, 5, 6), (2, 3)), ((3, 4, 5, 6), (-1, 1, 2)), ((3, 4, 5, 6), (0, 2)), ((3, 4, 5, 6), 1), ((3, 4, 5, 6), ()),
    ((4, 6), [0, 1]), ((3, 1, 5, 1), (1, 2)), ((1, 6, 1), (0,)), ((3, 70_001), 1), ((40_000, 1), 1), ((140_003,), None),
    ((0,), None), ((8, 0), -1), ((8, 0), 0), ((3, 0, 4), (1, 2)),
]  # fmt: skip
WINDOWS = [((3, 600), 7, 2), ((40,), 40, 1), ((2, 3, 200), 5, 9), ((40,), 1, 1), ((5000,), 2, 3)]
# (x, weight, groups and other arguments) of convolutions
CONVOLUTIONS = [
    ((2, 8, 7, 9), (12, 8, 3, 3), {"padding": 1}), ((2, 8, 7, 9), (12, 8, 3, 2), {"stride": 2}),
    ((2, 8, 7, 9), (12, 8, 3, 2), {"stride": (1, 2), "padding": (2, 0), "dilation": (1, 2)}),
    ((2, 8, 7, 9), (12, 8, 3, 2), {"dilation": 2, "padding": 2}), ((2, 8, 7, 9), (12, 8, 3, 2), {"padding": "same"}),
    ((2, 8, 7, 9), (12, 8, 3, 2), {"padding": "valid"}),
    ((2, 8, 7, 9), (12, 8, 3, 2), {"padding": "same", "dilation": 3}), ((2, 6, 11), (4, 6, 3), {}),
    ((2, 6, 11), (6, 1, 3), {"groups": 6}), ((2, 8, 5, 5), (12, 2, 3, 3), {"groups": 4}),
    ((2, 8, 5, 5), (8, 1, 3, 3), {"groups": 8}), ((1, 3, 4, 5, 6), (5, 3, 2, 2, 2), {}),
    ((0, 8, 5, 5), (4, 8, 3, 3), {}), ((8, 5, 5), (4, 8, 3, 3), {}), ((1, 1, 1, 1), (1, 1, 1, 1), {}),
]  # fmt: skip
PIXELS = [
    (8, 16, 3), (2, 8, 16, 3), (7, 5, 3), (3, 7, 5, 3), (2, 150, 211, 3), (2, 160, 208, 3), (2, 4, 8, 4), (2, 5, 3, 4),
    (2, 4, 8, 1), (3, 5, 7, 1), (2, 6, 4, 2), (2, 3, 4, 5), (1, 2, 3, 1100), (1, 1, 3), (2, 1, 1, 3), (2, 1, 8, 3),
    (2, 8, 1, 3), (0, 4, 8, 3), (2, 0, 8, 3), (2, 4, 8, 0),
]  # fmt: skip
ROTATED = [
    ((2, 3, 7, 8), (7, 8)), ((2, 3, 7, 8), (2, 1, 7, 8)), ((7, 8), (8,)), ((8,), (8,)), ((0, 3, 7, 8), (7, 8)),
    ((2, 7, 0), (7, 0)), ((2, 3, 4, 4100), (4, 4100)), ((2, 3, 2, 3, 2, 2, 3, 8), (3, 1, 1, 3, 8)),
]  # fmt: skip
LEADING = [(2, 3), (3,), (), (2, 1, 3)]


def output_of(x, weight, options):
    """The shape of a convolution."""
    on_meta = [torch.empty(shape, device="meta") for shape in (x, weight)]
    return tuple(ops.conv_act(*on_meta, **options).shape)


def convolved(x, weight, options):
    residual = t(*output_of(x, weight, options))
    bias = t(weight[0])
    yield call(t(*x), t(*weight), bias, residual, activation="silu", **options)
    yield call(t(*x), t(*weight), bias, activation="relu", **options)


def attended(leading, queries=20, keys=24, width=8, value_width=8):
    return t(*leading, queries, width), t(*leading, keys, width), t(*leading, keys, value_width)


def affine(*shape, kind=None):
    return t(*shape, spread=0.3, mean=1.0, kind=kind), t(*shape, kind=kind)


def row(*shape):
    return t(*shape, spread=2.0, mean=0.5)


def _norms_of_rows():
    """Calls of layer_norm_act; those of rms_norm_act have no bias."""
    shape = (5, 6, 96)
    for i, act in each():
        weight, bias = affine(96)
        residual = t(*shape) if (i + 1) % 3 else None
        weight, bias = (weight if i % 4 else None, bias if i % 5 else None)
        options = {"activation": act, "residual": residual, "return_sum": i % 2 == 0, "negative_slope": 0.2}
        yield row(*shape), 96, weight, bias, options
    for i, length in enumerate(LENGTHS):
        rows = 37 if length < 5000 else 5
        residual = t(rows, length) if i % 2 else None
        yield row(rows, length), length, *affine(length), {"residual": residual, "has_gradient": length > 2}
    for rows in (0, 1, 2, 3, 130, 4097):
        yield row(rows, 64), (64,), *affine(64), {"residual": t(rows, 64), "activation": "relu", "return_sum": True}
    for sizes in ((2, 3, 4, 5), (0, 3, 4, 5)):
        for inner in (1, 2, 3):
            yield row(*sizes), sizes[-inner:], *affine(*sizes[-inner:]), {"residual": t(*sizes)}
    for sizes, residual in REPEATED:
        yield row(*sizes), (8,), *affine(8), {"residual": t(*residual), "return_sum": True, "activation": "silu"}
    for columns in (7, 96, 1001, 4096, 9000):
        yield row(4, columns), columns, *affine(columns, kind=WIDE), {"activation": "silu", "is_rounded": True}


def layer_norms(dims=(), **fixed):
    """Calls of a layer norm under another name."""
    for shape in ((3, 6, 8), (2, 4, 3, 5, 6), (70, 16), (0, 4, 8)):
        yield call(row(*shape), shape[-1], *affine(shape[-1]), **fixed)


def rms_norms():
    for shape in ((3, 6, 8), (2, 4, 3, 5, 6), (70, 16), (0, 4, 8)):
        yield call(row(*shape), shape[-1], affine(shape[-1])[0], 1e-5)


def sums(*weights):
    for shape, residual in (((3, 6, 8), (3, 6, 8)), ((70, 16), (70, 16)), ((0, 4, 8), (0, 4, 8)), *REPEATED[:2]):
        yield call(row(*shape), t(*residual), shape[-1], *(affine(shape[-1])[: weights[0]]), eps=1e-5)


def batch_norms():
    shapes = [(2, 8, 4, 4), (4, 8), (3, 7, 5, 3), (2, 16, 3), (1, 4, 70_001), (300, 8, 2, 2), (2, 1, 9, 8), (0, 8, 4)]
    for i, shape in enumerate([*shapes, (5, 96), (2, 1, 33), (40, 1), (900, 2, 3)]):
        yield shape, ops.ACTIVATIONS and list(ops.ACTIVATIONS)[i], None
        if i < 3:
            yield shape, "silu", WIDE


def blocks(leading=((2,), (), (0,))):
    return [(*each, 4, 6, 6) for each in leading]


def quantized(x, **options):
    one = t(1, positive=True, kind=torch.float32, learned=False)
    for shape, dim in CHANNELS[:8]:
        wide = t(shape[dim], positive=True, kind=WIDE, learned=False)
        points = ids(40, shape[dim])
        for scale, point in ((0.0371, 3), (wide, points), (one, -7), (wide, 5), (0.03, points), (wide, ids(4, 1))):
            yield call(x(shape), scale, point, dim, **options)


def images():
    for i, shape in enumerate(PIXELS):
        channels = shape[-1]
        mean, std = [0.3 + 0.1 * (c % 4) for c in range(channels)], [0.2 + 0.1 * (c % 5) for c in range(channels)]
        formats = (torch.contiguous_format, torch.channels_last)
        yield call(ids(256, *shape, kind=torch.uint8), mean, std, dtype=DTYPE, memory_format=formats[i % 2])
    tensors = t(3, learned=False, kind=WIDE), t(3, positive=True, learned=False, kind=WIDE)
    yield call(ids(256, 7, 5, 3, kind=torch.uint8), *tensors, dtype=DTYPE)


LOGITS = [(5, 33), (1, 1), (33, 128), (8, 1000), (6, 4097), (4, 32_000), (300, 16), (0, 8), (6, 1001), (3, 5000)]
LOSSES: list[dict[str, Any]] = [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 2}]
LOSS_PAIRS = [
    ((5, 33), (5, 33)), ((), ()), ((7,), (7,)), ((9, 1025), (9, 1025)), ((70_003,), (70_003,)), ((5, 7), (7,)),
    ((5, 1), (1, 7)), ((5, 7), ()), ((3,), (2, 3)), ((2, 8, 6, 10), (2, 8, 6, 10)),
]  # fmt: skip
ELEMENTWISE = {
    name: [call(*(t(*shape, spread=0.7) for shape in shapes)) for shapes in PAIRS]
    for name in (
        "add_relu", "multiply_relu", "add_sigmoid", "mul_tanh", "add_mul_exp", "swish_multiply", "geglu", "mish_scale",
    )
}  # fmt: skip
ACT = list(ops.ACTIVATIONS)
MASKS = [(2, 3, 5, 16), (2, 1, 5, 16), (2, 1, 1, 16), (5, 16), (16,), (2, 3, 5, 1), (1, 3, 1, 1), ()]
SOFTMAX = [
    (3, 33), (1,), (7,), (5, 128), (4, 1024), (3, 1025), (2, 4096), (3, 9000), (2, 40_000), (300, 64), (2, 3, 5, 17),
    (0, 8), (8, 0),
]  # fmt: skip

SAMPLES: dict[str, list[Call]] = {
    **ELEMENTWISE,
    "mish_scale": [*ELEMENTWISE["mish_scale"], *(call(t(5, 70), scale) for scale in (0.5, 0.1, 3, -2.7))],
    "act_mul": [
        *(call(t(5, 7, 40, spread=3), t(5, 7, 40, spread=3), act, 0.2) for act in ACT),
        *(call(t(*shape), t(*other), "gelu") for shape, other in PAIRS),
    ],
    "attention_dropout": [call(t(2, 3, 5, 40), 0.3, False), call(t(0, 5, 40), 0.3, False)],
    "attention_score": [
        *(call(*attended(leading)[:2], scale) for leading in LEADING for scale in (None, 0.3)),
        *(
            call(t(*q), t(*k), 0.5)
            for q, k in [
                ((2, 3, 5, 4), (1, 3, 6, 4)),
                ((5, 4), (2, 3, 6, 4)),
                ((0, 5, 4), (0, 6, 4)),
                ((2, 5, 4), (2, 0, 4)),
                ((2, 5, 0), (2, 6, 0)),
                ((2, 0, 4), (2, 6, 4)),
            ]
        ),
    ],
    "batch_norm_act": [
        call(t(*shape), *statistics(shape[1], kind), *affine(shape[1], kind=kind), 1e-3, act, 0.1, factor=2)
        for shape, act, kind in batch_norms()
    ]
    + [call(t(3, 6, 5), *statistics(6), None, None), call(t(3, 6, 5), *statistics(6), t(6), None, activation="gelu")],
    "batch_norm_relu": [
        *(call(t(*shape), *affine(shape[1]), *statistics(shape[1])) for shape in ((3, 6, 8), (70, 16), (0, 4, 8))),
        call(t(3, 6, 8), *affine(6, kind=WIDE), *statistics(6, WIDE)),
        call(t(7, 6), None, t(6), *statistics(6), has_gradient=False),
    ],
    "bias_act": [
        *(
            call(t(5, 7, 40, spread=1.5), t(40) if i % 2 else None, t(5, 7, 40) if i % 3 else None, act, 0.2)
            for i, act in each(ACT * 2)
        ),
        *(call(t(*shape), t(shape[dim]), None, ACT[i % 3], dim=dim) for i, (shape, dim) in enumerate(CHANNELS)),
        *(
            call(t(2, c, *size), t(c), t(2, c, *size), "silu", dim=1)
            for c in (1, 3, 8)
            for size in ((1, 1), (5, 7), (3, 129))
        ),
    ],
    "bias_dropout_add": [call(t(*x), t(x[d]), t(*x), 0.0, dim=d) for x, d in CHANNELS[:5]]
    + [call(t(5, 8), None, t(5, 8), 0.4, False)],
    **{f"bias_{act}": [call(t(*x), t(x[d]), d) for x, d in CHANNELS[:6]] for act in ("relu", "gelu", "silu")},
    "block_sparse_attention": [
        call(
            *attended(leading, queries, keys, 16, 16),
            T((*of_layout, -(-queries // size), -(-keys // size)), kind=torch.bool),
            size,
            factor=2,
        )
        for leading, of_layout, queries, keys, size in [
            ((2, 3), (2, 1), 20, 24, 32),
            ((), (), 20, 24, 8),
            ((3,), (), 24, 24, 8),
            ((2, 3), (3,), 20, 24, 5),
            ((2, 1, 3), (2, 1, 3), 20, 24, 8),
            ((2, 3), (), 256, 300, 32),
            ((1, 2), (2,), 256, 256, 64),
            ((1, 2), (2,), 300, 300, 128),
            ((2, 3), (2, 1), 150, 300, 100),
        ]
    ],
    "chunked_attention": [
        call(*attended(leading, value_width=12), size, scale)
        for leading, size, scale in [
            ((2, 3), 7, None),
            ((), 8, 0.3),
            ((2, 2), 20, None),
            ((0, 2), 10, None),
            ((2, 3), 64, 0.3),
        ]
    ],
    "contract": [
        call("bij,bjk->bik", t(2, 5, 6), t(2, 6, 4), shape=(10, -1)),
        call("ij,jk->ik", t(5, 6), t(6, 7), shape=(35,)),
        call("bnhd,hde->bne", t(2, 5, 3, 4), t(3, 4, 6), shape=(10, 6)),
        call("ij->ji", t(5, 6), shape=(2, 15)),
        call("bhid,bhjd->bhij", t(2, 3, 5, 4), t(2, 3, 7, 4), shape=[6, 5, 7]),
        call("ij,ij", t(5, 6), t(5, 6), shape=()),
        call("ij,jk,kl->il", t(5, 6), t(6, 3), t(3, 4)),
        call("ij,jk->ik", t(0, 6), t(6, 7), shape=(0, 7)),
    ],
    "conv2d_bn_act": [
        *(call(t(*x), t(6, 4, 3, 3), t(6), *statistics(6), *affine(6), act, 1, 1) for x, act in zip(blocks() * 4, ACT)),
        *(
            call(t(2, 4, 6, 6), t(6, 4, 3, 3), None, *statistics(6), None, None, "relu", *rest)
            for rest in ((2, 1, 1), (1, (2, 1), (2, 1)), ((1, 2), "valid"))
        ),
        call(t(2, 4, 6, 6), t(6, 2, 3, 3), t(6), *statistics(6), *affine(6), "none", 1, 0, 1, 2, 0.1),
    ],
    "conv2d_gelu_dropout": [
        *(call(t(*x), t(6, 4, 3, 3), t(6), 0.4, False, 1, 1) for x in blocks()),
        *(
            call(t(2, 4, 6, 6), t(6, 4, 3, 3), None, 0.4, False, *rest)
            for rest in ((2, 1, 1), (1, (2, 1), (2, 1)), ((1, 2), "valid"))
        ),
        call(t(2, 4, 6, 6), t(6, 2, 3, 3), t(6), 0.1, False, 1, 0, 1, 2),
    ],
    "conv_act": [
        *(
            call(
                t(2, 8, 7, 9),
                t(12, 8, 3, 3),
                t(12) if i % 2 else None,
                t(2, 12, 7, 9) if i % 3 else None,
                padding=1,
                activation=act,
                negative_slope=0.2,
            )
            for i, act in each(ACT * 2)
        ),
        *(sample for given in CONVOLUTIONS for sample in convolved(*given)),
    ],
    "cross_entropy": [
        call(
            t(*shape, spread=3.0),
            ids(shape[1], shape[0]),
            is_rounded="label_smoothing" in options,
            summand=float(shape[1] == 1),  # of one class: its probability, 1, less 1
            **options,
        )
        for i, shape in enumerate(LOGITS)
        for options in (LOSSES[i % 4], {"reduction": "none", "label_smoothing": 0.3})
    ],
    "depthwise_pointwise": [
        *(call(t(*x), t(8, 1, 3, 3), t(8), t(6, 8, 1, 1), t(6), act, 1, 1) for x, act in zip(blocks() * 4, ACT)),
        *(
            call(t(2, 4, 6, 6), t(8, 1, 3, 3), None, t(6, 8, 1, 1), None, "relu", *rest)
            for rest in ((2, 1, 1), (1, (2, 1), (2, 1)), ((1, 2), "valid"))
        ),
    ],
    "dequantize_int8": list(quantized(lambda shape: ids(128, *shape, kind=torch.int8), dtype=DTYPE)),
    "embedding_layer_norm": [
        call(
            ids(11, *shape, kind=kind),
            t(11, cols),
            t(7, cols),
            t(2, cols),
            *affine(cols),
            1e-5,
            ids(2, *shape, kind=kind) if typed else None,
            factor=1.4,
            summand=1e-5**-0.5 if cols == 1 else 0.0,  # of one column: 1 / sqrt(eps) of a value, less that of the mean
        )
        for shape, kind, cols, typed in [
            ((2, 5), torch.int64, 8, False),
            ((7,), torch.int32, 8, True),
            ((2, 3, 1), torch.int64, 33, True),
            ((0, 5), torch.int64, 8, False),
            ((2, 0), torch.int32, 8, False),
            *(((5, 6), torch.int64, cols, cols % 2 == 0) for cols in (1, 33, 96, 768, 1001, 3000, 4096, 16384, 20000)),
        ]
    ]
    + [
        call(ids(11, 2, 5), t(11, 8), t(7, 8), t(2, 8), weight, bias)
        for weight, bias in ((None, t(8)), (t(8), None), (None, None))
    ]
    + [call(ids(11, 2, 5), t(11, 8), t(7, 8), t(2, 8), *affine(8, kind=WIDE), has_gradient=False, is_rounded=True)],
    "ffn_block": [
        *(
            call(t(*leading, 5, 8), t(12, 8), t(12), t(7, 12), t(7), act, factor=1.4)
            for leading, act in zip(((2,), (), (0,)) * 4, ACT)
        ),
        call(t(5, 8), t(12, 8), None, t(7, 12), None, "gelu", 0.4, False, factor=1.4),
    ],
    "flash_attention": [
        *(
            call(*attended(leading, keys=keys), scale, causal)
            for leading in LEADING
            for keys, scale, causal in ((20, None, True), (24, 0.3, True), (24, None, False))
        ),
        *(call(*attended((2, 2), **sizes)) for sizes in ({"queries": 0}, {"value_width": 12})),
        call(*attended((2, 2), queries=1, keys=1), has_gradient=False),
        call(*attended((0, 2))),
        call(*attended((2,), keys=0)),
        call(*attended((2, 3)), -0.5, True),
    ],
    "fused_linear_activation": [call(t(*leading, 5, 8), t(12, 8), t(12), "silu") for leading in ((2,), (), (0,))]
    + [call(t(5, 8), t(12, 8), None, "relu")],
    "fused_multihead_attention": [
        call(*attended(leading, width=32, value_width=16), 4) for leading in ((2,), (), (2, 3), (0,))
    ],
    "gelu_dropout": [call(t(*shape), 0.0) for shape, _ in CHANNELS[:5]] + [call(t(5, 8), training=False)],
    "group_norm_act": [
        *(call(row(*shape), groups, *affine(shape[1]), 1e-6, "silu", factor=2.5) for shape, groups in GROUPS),
        *(call(row(3, 8, 6, 8), 2, *affine(8), activation=act, negative_slope=0.2) for act in ACT),
        call(row(3, 8, 5), 4, t(8), None),
        call(row(3, 8, 5), 4),
        call(row(3, 8, 5), 4, None, t(8), has_gradient=False),
        call(t(2, 8, 64, 64, mean=300.0), 2, *affine(8), has_gradient=False),
    ],
    "group_norm_silu": [
        call(row(*shape), 2, *affine(shape[1])) for shape in ((3, 6, 8), (2, 4, 3, 5, 6), (70, 16), (0, 4, 8))
    ],
    "layer_norm_act": [call(x, shape, weight, bias, **options) for x, shape, weight, bias, options in _norms_of_rows()],
    **{f"layer_norm_{act}": list(layer_norms()) for act in ("relu", "gelu", "silu")},
    "add_layer_norm": list(sums(2)),
    "add_rms_norm": list(sums(1)),
    "linear_act": [
        *(call(t(5, 48), t(24, 48), t(24) if i % 2 else None, act, 0.2) for i, act in each(ACT * 2)),
        *(
            call(t(*shape), t(out, shape[-1]), t(out), "gelu")
            for shape in [(8,), (1, 8), (3, 5, 7), (2, 3, 4, 9), (0, 8), (2, 0, 8), (4, 0), (1, 1)]
            for out in (1, 6, 0)
        ),
    ],
    "mse_loss": [
        call(t(*shape), t(*other), reduction) for shape, other in LOSS_PAIRS for reduction in ("mean", "sum", "none")
    ],
    "normalize_image": list(images()),
    "prelu_bias": [call(t(*x), t(x[d], mean=0.3), t(x[d]), d) for x, d in CHANNELS]
    + [call(t(5, 8), t(1), t(8)), call(t(5, 8), t(), t(8))],
    "quantize_int8": list(quantized(lambda shape: t(*shape, spread=2.0, learned=False))),
    "reduce_mean_abs": [call(t(*shape), dim, i % 2 == 0) for i, (shape, dim) in enumerate(REDUCED)],
    "reduce_sum_squared": [call(t(*shape), dim, i % 2 == 1) for i, (shape, dim) in enumerate(REDUCED)],
    "rms_norm": list(rms_norms()),
    "rms_norm_act": [
        call(x, shape, weight, offset=float(i % 2), **options)
        for i, (x, shape, weight, _, options) in enumerate(_norms_of_rows())
    ],
    "rms_norm_gelu": list(rms_norms()),
    "rope": [call(t(*x), t(*angles), t(*angles), i % 2 == 1) for x, angles in ROTATED for i in range(2)]
    + [call(t(2, 3, 7, 8), t(7, 8, learned=False), t(7, 8, learned=False), turned) for turned in (False, True)],
    "rope_attention": [
        call(*attended(leading, keys=20), t(20, 8), t(20, 8), 0.3, True, i % 2 == 1)
        for i, leading in enumerate(LEADING)
    ],
    "scale_shift_act": [
        *(call(t(3, 8, 5, 8), t(8, kind=WIDE), t(8, kind=WIDE), act, 0.2) for act in ACT),
        *(
            call(t(*shape), t(shape[1], kind=WIDE), t(shape[1], kind=WIDE), "relu")
            for shape in [
                (5, 7),
                (1, 1),
                (3, 8),
                (2, 3, 5),
                (2, 16, 4, 4),
                (2, 16, 5, 7),
                (2, 6, 3, 129),
                (1, 24, 33, 65),
                (2, 3, 2, 3, 4),
                (0, 4, 4, 4),
                (2, 0, 3, 3),
                (3, 1, 9, 9),
            ]
        ),
    ],
    "sliding_window": [
        call(t(*x, spread=3.0, mean=1.0), size, stride, reduce)
        for x, size, stride in WINDOWS
        for reduce in ("mean", "sum", "max", "min", "std")
    ],
    "sliding_window_mean_std": [
        call(t(*shape, spread=3.0, mean=1.0), window)
        for shape in ((3, 40), (2, 3, 200), (5000,))
        for window in (7, 1, 2, 40)
    ],
    "softmax": [
        *(call(t(*shape, spread=3.0), -1, (1.0, 0.125)[i % 2]) for i, shape in enumerate(SOFTMAX)),
        *(
            call(t(2, 3, 5, 16, spread=3.0), -1, 0.3, mask)
            for shape in MASKS
            for mask in (t(*shape, learned=shape[-1:] > (1,)), T(shape, kind=torch.bool))
        ),
        *(
            call(t(4, columns, spread=3.0), scale=0.3, mask=mask, factor=2)
            for columns in (15, 200, 1000, 1024, 4096, 9000, 20_001)
            for mask in (T((columns,), kind=torch.bool), t(4, columns))
        ),
        *(
            call(t(2, 3, 2, 3, 2, 3, 8), mask=t(*mask, learned=mask[-1] > 1))
            for mask in ((2, 1, 2, 1, 2, 1, 8), (2, 1, 2, 1, 2, 1, 1), (1, 3, 1, 3, 1, 3, 8))
        ),
        *(call(t(4, 6, 8), dim, 0.5) for dim in (0, 1, 2, -2)),
        call(t()),
    ],
}
