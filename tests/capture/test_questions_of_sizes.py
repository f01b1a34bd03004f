"""What Python code may ask of free sizes: served calls return what the model does, whatever it asks."""

import copy
import enum
import math
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kfconvert import ModelConverter
from kfconvert.capture import Capture, capture_forms
from kfconvert.inputs import ExampleCall

# (batch size, length); the converter sees the first.
SIZES = [(4, 6), (1, 3), (1, 5), (2, 5), (3, 1), (4, 1), (1, 1), (4, 3), (1, 6), (3, 4), (4, 12), (10, 6)]


class Kind(enum.IntEnum):
    THREE = 3


def kind_of(size):
    try:
        return 2.0 if Kind(size) is Kind.THREE else 3.0
    except ValueError:
        return 1.0


def index_of(size):
    try:
        return 1.0 + [3, 1, 5].index(size)
    except ValueError:
        return 0.5


def matched(x):
    match tuple(x.shape):
        case (1, 3):
            return 2.0
        case (2, _):
            return 3.0
    return 1.0


def nested(x):
    if x.shape[0] == 1:
        if x.shape[1] == 3:
            return 2.0
    return 1.0


def looked_up_alone(x):
    if x.shape[0] == 1:
        return [1.0, 2.0, 3.0, 4.0, 1.0, 1.0, 1.0][x.shape[1]]
    return 1.0


def loop(x):
    for size, other in zip(x.shape, (1, 3)):
        if size != other:
            return 1.0
    return 2.0


def lengths(x):
    limit = 5
    if x.shape[0] > 1:
        limit = 100
    return 2.0 if x.shape[1] == limit else 1.0


def halvings(x):
    count, size = 0, x.shape[0] * x.shape[1]
    while size > 1:
        size, count = size // 2, count + 1
    return 1.0 + count


def constant(x):
    limit = 3 if x.shape[0] == 1 else 100
    return 2.0 if x.shape[1] == limit else 1.0


def constant_in_a_table(x):
    step = 3 if x.shape[0] == 1 else 0
    return [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0][step] + (x.shape[1] + step) * 0.5


def caught(x):
    try:
        return {4: 2.0, 3: 5.0}[x.shape[0]]
    except (KeyError, TypeError):
        return 1.0


ASKED = {
    "dict": lambda x: {1: 2.0, 3: 4.0}.get(x.shape[1], 0.5),
    "window by a size of one": lambda x: x[:, -(2 if x.shape[0] == 1 else 8) :].float().mean(),
    "limit by a size of one": lambda x: x.clamp(max=3 if x.shape[0] == 1 else 100).float().mean(),
    "list by a size of one": lambda x: [2.0, 3.0][0 if x.shape[0] == 1 else 1],
    "dict of a batch": lambda x: {1: 2.0, 3: 4.0}.get(x.shape[0], 0.5),
    "dict, errors caught": caught,
    "dict of tuples": lambda x: {(1, 3): 2.0, (2, 5): 4.0}.get(tuple(x.shape), 0.5),
    "dict of a derived size": lambda x: {1: 2.0, 2: 4.0}.get(x.shape[1] // 2, 0.5),
    "set": lambda x: 2.0 if x.shape[0] in {1, 3, 4} else 1.0,
    "set of sizes": lambda x: float(len({*x.shape})),
    "hash": lambda x: float(hash(x.shape[1]) % 5),
    "dict of floats": lambda x: {1.5: 2.0, 0.5: 3.0}.get(x.shape[1] / 2, 0.5),
    "dict of answers": lambda x: {True: 2.0, False: 0.5}[x.shape[1] > 3],
    "dict of equality": lambda x: {True: 2.0, False: 0.5}[x.shape[1] == 1],
    "enum": lambda x: kind_of(x.shape[1]),
    "length of text": lambda x: float(len(str(x.shape[1]))),
    "length of text of a batch": lambda x: float(len(f"{x.shape[0]}")),
    "f-string": lambda x: 2.0 if f"{x.shape[1]}" == "3" else 1.0,
    "f-string among f-strings": lambda x: (2.0 if f"{x.shape[1]}" == "3" else 1.0) if f"{x.shape[0]} rows" else 1.0,
    "f-string that is empty": lambda x: 2.0 if f"{x.shape[1]}".strip("3") else 1.0,
    "conversion": lambda x: 2.0 if f"{x.shape[1]!s:>2}" == " 3" else 1.0,
    "format": lambda x: 2.0 if "{}".format(x.shape[1]) == "3" else 1.0,  # noqa: UP032
    "format()": lambda x: 2.0 if format(x.shape[1], "03d") == "003" else 1.0,
    "percent": lambda x: 2.0 if "%s" % x.shape[1] == "3" else 1.0,
    "percent d": lambda x: 2.0 if "%d" % x.shape[1] == "3" else 1.0,
    "repr of a shape": lambda x: 2.0 if "(1, 3)" in repr(tuple(x.shape)) else 1.0,
    "text of torch.Size": lambda x: 2.0 if "[1, 3]" in str(x.shape) else 1.0,
    "text of a float": lambda x: 2.0 if str(x.shape[1] / 2) == "1.5" else 1.0,
    "text of an answer": lambda x: float(len(str(x.shape[1] == 3))),
    "text of a derived size": lambda x: float(len(str(x.shape[0] * x.shape[1]))),
    "shape in a list": lambda x: 2.0 if tuple(x.shape) in [(1, 3), (2, 5)] else 1.0,
    "shape": lambda x: 2.0 if x.shape == (1, 3) else 1.0,
    "shape, other way": lambda x: 2.0 if (1, 3) == tuple(x.shape) else 1.0,
    "list": lambda x: 2.0 if list(x.shape) == [1, 3] else 1.0,
    "order of shapes": lambda x: 2.0 if tuple(x.shape) < (1, 5) else 1.0,
    "shape of a batch": lambda x: 2.0 if tuple(x.shape) == (4, 1) else 1.0,
    "and": lambda x: 2.0 if x.shape[0] == 1 and x.shape[1] == 3 else 1.0,
    "bitwise and": lambda x: 2.0 if (x.shape[0] == 1) & (x.shape[1] == 3) else 1.0,
    "nested": nested,
    "loop": loop,
    "match": matched,
    "all": lambda x: 2.0 if all(size in (1, 3) for size in x.shape) else 1.0,
    "any": lambda x: 2.0 if any(size == 3 for size in x.shape if size != 4) else 1.0,
    "index in a list": lambda x: index_of(x.shape[1]),
    "numel": lambda x: 2.0 if x.numel() == 3 else 1.0,
    "sum": lambda x: 2.0 if x.shape[0] * 10 + x.shape[1] == 13 else 1.0,
    "product": lambda x: 2.0 if math.prod(x.shape) in (3, 5) else 1.0,
    "number of an answer": lambda x: 1.0 + int(x.shape[0] == 1) * [0.0, 1.0, 2.0, 3.0][x.shape[1] % 4],
    "list by an answer": lambda x: [1.0, 2.0][x.shape[0] == 1],
    "list by a size": lambda x: (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)[x.shape[1] % 8],
    "list by a size where a batch is 1": looked_up_alone,
    "slice": lambda x: float(len("abcdefghijklmn"[: x.shape[1]])),
    "range": lambda x: float(len(range(x.shape[1]))),
    "repetition": lambda x: float(len([0] * x.shape[1])),
    "max": lambda x: float(max(x.shape[0], x.shape[1]) == 3),
    "sorted": lambda x: float(sorted([*x.shape, 2])[1] == 3),
    "math": lambda x: float(math.gcd(x.shape[1], 3)),
    "sqrt": lambda x: math.floor(math.sqrt(x.shape[1])) * 1.0,
    "bits": lambda x: float(x.shape[1].bit_length()),
    "power": lambda x: float(x.shape[1] ** 2 == 9),
    "halvings": halvings,
    "lengths": lengths,
    "constant": constant,
    "constant in a table": constant_in_a_table,
    "numpy": lambda x: float(numpy.prod(numpy.array(x.shape)) % 7),
    "numpy of one": lambda x: float(numpy.log2(x.shape[1])),
    "copy": lambda x: 2.0 if copy.deepcopy(x.shape[1]) == 3 else 1.0,
    "truth": lambda x: 2.0 if x.shape[0] - 1 else 1.0,
    "isinstance": lambda x: 2.0 if isinstance(x.shape[1], int) else 1.0,
    "type": lambda x: 2.0 if type(x.shape[1]) is int else 1.0,
    "name of the type": lambda x: 2.0 if x.shape[1].__class__.__name__ == "int" else 1.0,
    "attribute": lambda x: 2.0 if hasattr(x.shape[1], "to_bytes") else 1.0,
    "transposed": lambda x: 2.0 if x.t().is_contiguous() else 1.0,
    "stride": lambda x: 2.0 if x.stride(0) == 1 else 1.0,
    "strides": lambda x: 2.0 if x.stride() == (3, 1) else 1.0,
    "stride of a transposed": lambda x: 2.0 if x.t().stride() == (1, 1) else 1.0,
    "stride of a slice": lambda x: 2.0 if x[:, :1].is_contiguous() else 1.0,
    "storage": lambda x: 2.0 if x[1:].storage_offset() == 3 else 1.0,
}


class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, input_ids):
        return torch.relu(input_ids.float()) * ASKED[self.name](input_ids)


@pytest.mark.parametrize("name", ASKED)
@torch.no_grad()
def test_served_calls_are_right(name):
    model, example = Net(name).eval(), torch.randint(1, 20, SIZES[0])
    (captured,) = capture_forms(model, [ExampleCall((example,), {})], lambda: None, None)
    assert isinstance(captured, Capture)  # with all sizes fixed, if need be
    for size in SIZES:
        for ids in (torch.randint(1, 20, size), torch.randint(1, 20, (12, 14))[: size[0], : size[1]]):
            if captured.region.guard.refusal([ids]) is None:
                torch.testing.assert_close(captured.variant(()).run([ids]), model(ids), msg=str(size))


class Fused(nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.embedding, self.linear, self.asks = nn.Embedding(20, 8), nn.Linear(8, 8), asks

    def forward(self, input_ids):
        return torch.relu(self.linear(self.embedding(input_ids))) * self.asks(input_ids)


def hits_of(asks, calls, example=SIZES[0], **options):
    """How many of ``calls`` a converted model serves; all must return what the model does."""
    model = Fused(asks).eval()
    converter = ModelConverter(select="all", **options)
    fused = converter.convert_model(copy.deepcopy(model), example_inputs=torch.randint(20, example))
    with torch.no_grad():
        for ids in calls:
            torch.testing.assert_close(fused(ids), model(ids), msg=str((tuple(ids.shape), ids.stride())))
    return fused.kfconvert_info()["guard"]["hits"]


def calls_of(sizes):
    return [torch.randint(20, size) for size in sizes]


@pytest.mark.parametrize("name", ["dict", "length of text", "shape in a list", "transposed", "isinstance"])
@pytest.mark.filterwarnings("ignore:kfconvert")
def test_a_converted_model_returns_the_same(name):
    assert hits_of(ASKED[name], calls_of(SIZES), validate_accuracy=name != "isinstance")


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_strides_of_sizes_of_one():
    odd = [torch.randint(20, (1, 1)).as_strided((1, 1), strides) for strides in ((100, 1), (1, 1), (7, 3))]
    assert hits_of(lambda x: 2.0 if x.stride(0) == 100 else 1.0, [*calls_of(SIZES), *odd])


HARMLESS = {
    "nothing": lambda x: 1.0,
    "one sequence": lambda x: float((x.shape[1] > 1 and x.dim() > 1) is not None),
    "shapes of two tensors": lambda x: 1.0 if x.shape == (x + 1).shape else 2.0,
    "lower limit": lambda x: 1.0 if x.shape[1] < 100 else 2.0,
    "message": lambda x: torch._check(x.shape[1] < 100, f"{x.shape[1]} is long") or 1.0,
    "assertion": lambda x: torch._assert(x.dim() == 2, f"{x.shape} is no batch") or 1.0,
    "warning": lambda x: x.shape[1] > 99 and warnings.warn(f"{x.shape[1]} is long") or 1.0,
}


@pytest.mark.parametrize(
    ("name", "example"), [*((name, SIZES[0]) for name in HARMLESS), ("one sequence", (1, 6))], ids=str
)
def test_questions_that_decide_nothing_fix_no_size(name, example):
    assert hits_of(HARMLESS[name], calls_of(SIZES), example) == len(SIZES)


def test_nothing_is_left_behind():
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool, ShapeEnv)
    before = [dict(vars(kind)) for kind in kinds]
    hits_of(ASKED["f-string"], [])
    assert [dict(vars(kind)) for kind in kinds] == before
