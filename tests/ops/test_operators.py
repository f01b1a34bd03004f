"""What holds for every operator: values, gradients, layouts, registration in torch, compilation, autocast, devices."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch
from support import selection
from support.accuracy import assert_as_accurate
from support.operator_samples import DTYPES, ELEMENTWISE, SAMPLES, T, runs, weights_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kfconvert import extension, ops
from kfconvert.kernels import reference

CASES = [(name, number) for name, samples in SAMPLES.items() for number in range(len(samples))]
# The largest error of PyTorch's own attention on CUDA is up to 8 times that of a product, a softmax and a product.
LIBRARY = {
    "flash_attention",
    "chunked_attention",
    "fused_multihead_attention",
    "rope_attention",
    "block_sparse_attention",
}
# Where the derivative jumps.
KINKS = {"relu": (0,), "relu6": (0, 6), "leaky_relu": (0,), "hardswish": (-3, 3), "hardsigmoid": (-3, 3)}
# Their gradient of an argument that repeats is the sum of gradients that were rounded to its dtype.
OF_ROUNDED_SUMMANDS = {"act_mul", *ELEMENTWISE}
# Operators of several tensors.
OF_SEVERAL = [name for name, (call, *_) in SAMPLES.items() if sum(isinstance(x, T) for x in call.args) > 1]
RANDOM = {"gelu_dropout", "bias_dropout_add", "conv2d_gelu_dropout", "attention_dropout", "ffn_block"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:std_mean"),  # by the definition, of no values
    pytest.mark.filterwarnings("ignore:Using padding"),  # by plain ATen
]


@contextlib.contextmanager
def describing(*what):
    """Names the run in an error."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def factor_of(name, sample, device, values):
    """How many times the error of plain ATen is allowed: more where a few values make it a matter of chance."""
    factor = sample.factor * (8 if name in LIBRARY and device == "cuda" else 1)
    return factor * (1.5 if values.numel() > 64 else 4 if values.numel() > 8 else 10)


def away_from_kinks(name, given, dtype):
    """Returns a function that sets weights of an output to 0 where rounding decides on which side of a kink it is.

    Up to four roundings, such as those of a sum with a residual, a norm, its product and its bias, come before the
    activation. Arguments that nothing rounds, and activations inside, have no such places.
    """
    values = (*given.args, *given.kwargs.values())
    kinks = next((KINKS[value] for value in values if isinstance(value, str) and value in KINKS), ())
    if not kinks or not given.leaves or name in {"act_mul", "ffn_block"}:
        return None
    args = ["none" if isinstance(x, str) and x in KINKS else x for x in given.args]
    kwargs = {key: "none" if isinstance(x, str) and x in KINKS else x for key, x in given.kwargs.items()}
    with torch.no_grad():
        before = replace(given, args=args, kwargs=kwargs).run(getattr(reference, name))[0]
    if before.numel() == 0:
        return None
    reach = 4 * torch.finfo(dtype).eps / 2 * before.abs().max()
    near = torch.stack([(before - kink).abs() <= reach for kink in kinks]).any(0)
    return lambda weights: weights.masked_fill(near.to(weights.device), 0) if weights.shape == near.shape else weights


def size_of_summands(name, wide, definition, place, count):
    """The size of the numbers that are rounded for the gradient of leaf ``place``, a sum that may cancel: of those
    rounded to its dtype, and of those rounded to the accumulator.

    With random signs of the outputs, the expected square of their sum is the sum of their squares. None of ``count``
    partial sums is above sqrt(count) times the root of that.
    """
    generator = torch.Generator().manual_seed(0)

    def signed(weights):
        return weights * (torch.randint(0, 2, weights.shape, generator=generator) * 2 - 1)

    draws = [wide.differentiated(definition, change=signed)[1][place] for _ in range(8)]
    root = torch.stack(draws).square().mean(0).sqrt().max().item()
    return root * (name in OF_ROUNDED_SUMMANDS), root * count**0.5


def compare(name, sample, dtype, layout, device):
    operator, definition = getattr(ops, name), getattr(reference, name)
    given = sample.made(dtype, device, layout)
    wide = given.in_float64()
    change = away_from_kinks(name, wide, dtype)
    found, exact = given.differentiated(operator, layout, change), wide.differentiated(definition, change=change)
    if sample.is_rounded and dtype.itemsize == 2:
        plain = [[e.to(g) for g, e in zip(*pair, strict=True)] for pair in zip(found, exact)]
    else:
        plain = given.contiguous().differentiated(definition, change=change)
    of_accumulator = torch.finfo(dtype if dtype.itemsize > 4 else torch.float32).eps / torch.finfo(dtype).eps
    # ATen's gradients of these round 1/6 to float32 even in float64.
    named = [value for value in (*given.args, *given.kwargs.values()) if isinstance(value, str)]
    rough = dtype == torch.float64 and not {"hardsigmoid", "hardswish"}.isdisjoint(named)
    for is_gradient, (mine, theirs, truth) in enumerate(zip(found, plain, exact, strict=True)):
        for place, (one, aten, true) in enumerate(zip(mine, theirs, truth, strict=True)):
            if aten is None:
                assert one is None or not one.any()
                continue
            if not one.is_floating_point():
                assert torch.equal(one, aten)
                continue
            slack = 1e-7 if rough else 1e-14 if dtype == torch.float64 else 1e-5 * (sample.is_rounded and is_gradient)
            if is_gradient and name in LIBRARY:
                # PyTorch's backward takes exp(score - log of the sum), of two rounded numbers: here of up to 16.
                slack += 16 * torch.finfo(torch.float32).eps * (dtype != torch.float64)
            factor = factor_of(name, sample, device, one)
            bounds = (2 * factor, factor) if is_gradient else factor
            as_accurate = functools.partial(assert_as_accurate, one, aten, true.to(device), bounds, slack)
            cancels = is_gradient and true.numel() and true.abs().max() <= 1e-9 * sample.summand
            try:
                as_accurate(summand=sample.summand * of_accumulator if cancels else 0.0)
            except AssertionError:
                if not is_gradient or not one.numel():
                    raise
                # Only where it matters, as it takes long: what a lucky error of plain ATen does not show.
                outputs = found[0][0].numel()
                count = max(1, outputs / one.numel())
                if dtype == torch.float64:  # where the sums of ATen's forward are not exact either
                    count = max(count, one.numel() / max(1, outputs))
                rounded, accumulated = size_of_summands(name, wide, definition, place, count)
                as_accurate(summand=rounded + accumulated * of_accumulator)
    return given, found


@pytest.mark.parametrize(("name", "number"), CASES)
def test_values_and_gradients(device, name, number):
    for dtype, layout in runs(number, device):
        # On CUDA, PyTorch's attention fails for half types that do not start at a multiple of 16 bytes.
        layout = "strided" if layout in ("misaligned", "mixed") and name in LIBRARY else layout
        with describing(name, number, dtype, layout):
            given, found = compare(name, SAMPLES[name][number], dtype, layout, device)
    if (
        name not in LIBRARY or device == "cpu"
    ):  # on CUDA, PyTorch's attention selects its kernel by more than the layout
        check_fake_kernels(name, given, found, layout, has_backward=selection.EXHAUSTIVE or number % 5 == 0)


def check_fake_kernels(name, given, found, layout, has_backward):
    """A tracer learns the same shapes, dtypes and strides from the fake kernels as from the real ones. A fake backward
    takes most of the time of these tests."""
    with FakeTensorMode() as mode:
        fakes = given.mapped(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x)
        if not has_backward:
            assert layouts(fakes.run(getattr(ops, name))) == layouts(found[0])
            return
        outputs, gradients = fakes.differentiated(getattr(ops, name), "ones")
    assert layouts(outputs) == layouts(found[0])
    # In other layouts some of ATen's operators in a backward have fake kernels that differ from the real ones.
    count = 3 if layout == "contiguous" else 2
    assert [each[:count] for each in layouts(gradients)] == [each[:count] for each in layouts(found[1])]


def layouts(values):
    tensors = (value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, torch.Tensor))
    return [(tuple(t.shape), t.dtype, t.stride() if t.numel() else ()) for t in tensors]


class Calls(TorchDispatchMode):
    """Collects calls of this package's operators: (operator, which arguments are None) -> arguments."""

    def __enter__(self):
        self.arguments = {}
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "kfconvert":
            self.arguments.setdefault((function, tuple(arg is None for arg in args)), args)
        return function(*args, **(kwargs or {}))

    @property
    def names(self):
        return {function.name().partition("::")[2] for function, _ in self.arguments}


def calls_of(name, device, count):
    """The calls of operators by the first samples, without and with gradients."""
    with Calls() as calls:
        for sample in SAMPLES[name][:count]:
            given = sample.made(torch.float32, device)
            given.differentiated(getattr(ops, name))
            with torch.no_grad():
                given.run(getattr(ops, name))
    return calls


CHECKED = set()


@pytest.mark.parametrize("name", SAMPLES)
def test_registration_in_torch(device, name):
    """Schema, fake kernel, autograd and tracing, of each operator once for each choice of None."""
    for (operator, absent), args in calls_of(name, device, 3).arguments.items():
        checked = {operator: [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]}
        if operator.name().endswith("_inference"):  # its twin has the same arguments, and gradients
            leaves = [
                x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in args
            ]
            checked[getattr(torch.ops.kfconvert, operator.name()[11:-10]).default] = leaves
        for each, arguments in checked.items():
            if (each, absent, device) not in CHECKED:
                CHECKED.add((each, absent, device))
                with describing(each, absent):
                    torch.library.opcheck(each, tuple(arguments))


@pytest.mark.skipif(not extension.EXTENSION_LOADED, reason="no compiled kernels")
def test_samples_reach_every_operator():
    reached = set().union(*(calls_of(name, "cpu", 3).names for name in SAMPLES))
    reached |= {name.removesuffix("_inference") for name in reached}
    elsewhere = {"attention_triton", "bias_act_", "decode_attention_", "linear_cross_entropy"}
    elsewhere |= {"linear_triton", "next_token_", "norm_linear", "quantized_linear", "skinny_linear"}
    every = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    names = {name for package, _, name in every if package == "kfconvert"}
    assert names - reached == elsewhere


@pytest.mark.parametrize("name", SAMPLES)
def test_compiled(device, name):
    """Dynamo traces the public function; ``opcheck`` has tried AOTAutograd with its operators."""
    operator, given = getattr(ops, name), SAMPLES[name][0].made(torch.float32, device)
    compiled = torch.compile(operator, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(given.run(compiled), given.run(operator))
    torch.compiler.reset()


@pytest.mark.parametrize("name", SAMPLES)
def test_autocast(device, compiled, name):
    operator, definition = getattr(ops, name), getattr(reference, name)
    given = SAMPLES[name][0].made(torch.float32, device)
    exact = given.in_float64().differentiated(definition)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = given.differentiated(operator), given.differentiated(definition)
    for mine, theirs, truth in zip(*(each[0] + each[1] for each in (got, want, exact)), strict=True):
        # Which dtype F.rms_norm returns depends on the device and the version of torch.
        assert mine.dtype == theirs.dtype or "rms" in name
        scale = truth.abs().max().item()
        torch.testing.assert_close(mine.double().cpu(), truth.double(), rtol=5e-2, atol=0.03 * scale)
    wide = SAMPLES[name][0].made(torch.float64, device)
    expected = wide.differentiated(operator)
    with torch.autocast(device, dtype=torch.bfloat16):
        torch.testing.assert_close(wide.differentiated(operator), expected, rtol=0, atol=0)


# These need arguments of one dtype under autocast too, or the dtype of ATen's result depends on the device.
OF_ONE_DTYPE = {"embedding_layer_norm", "group_norm_act", "group_norm_silu"}


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_dtypes_that_autocast_aligns(device, name):
    """x in a half type and all else in float32, where plain ATen takes that."""
    given = SAMPLES[name][0].made(torch.float32, device)
    if name in OF_ONE_DTYPE or not given.leaves:
        return
    first = given.leaves[0]
    half = given.mapped(lambda x: x.bfloat16() if x is first else x)
    with torch.autocast(device, dtype=torch.bfloat16), torch.no_grad():
        try:
            want = half.run(getattr(reference, name))
        except (RuntimeError, ValueError):
            return
        got = half.run(getattr(ops, name))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype or "rms" in name
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", SAMPLES)
def test_only_what_is_asked_for(device, name):
    """Each gradient alone is that of all together, and nothing else has one."""
    given = SAMPLES[name][0].made(torch.float64, device)
    _, together = given.differentiated(getattr(ops, name))
    for leaf, expected in zip(given.leaves, together):
        for other in given.leaves:
            other.requires_grad_(other is leaf)
        outputs = [y for y in given.run(getattr(ops, name)) if y.requires_grad]
        if outputs:
            (found,) = torch.autograd.grad(outputs, leaf, [weights_of(y, "contiguous") for y in outputs])
            torch.testing.assert_close(found, expected)
    with torch.no_grad():
        assert not any(y.requires_grad for y in given.run(getattr(ops, name)) if y is not given.args[0])


@pytest.mark.parametrize("name", SAMPLES)
def test_the_same_at_every_call(device, name):
    sample = max(
        SAMPLES[name], key=lambda sample: sum(torch.Size(x.shape).numel() for x in sample.args if isinstance(x, T))
    )
    given = sample.made(torch.float32, device)
    one, two = (given.differentiated(getattr(ops, name)) for _ in range(2))
    for first, second in zip(one[0] + one[1], two[0] + two[1]):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("name", OF_SEVERAL)
def test_two_devices(name):
    given = SAMPLES[name][0].made(torch.float32, "cuda")
    for place, value in enumerate(given.args):
        if isinstance(value, torch.Tensor):
            args = [x.cpu() if i == place else x for i, x in enumerate(given.args)]
            with pytest.raises(RuntimeError, match="another device|same device"):
                getattr(ops, name)(*args, **given.kwargs)


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in RANDOM])
def test_in_a_cuda_graph(name):
    given, other = (SAMPLES[name][0].made(torch.float32, "cuda") for _ in range(2))
    with torch.no_grad():
        given.run(getattr(ops, name))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = given.run(getattr(ops, name))
        for mine, new in zip(given.args, other.args):
            if isinstance(mine, torch.Tensor):
                mine.copy_(new)
        graph.replay()
        torch.testing.assert_close(recorded, given.run(getattr(ops, name)))


# Rows of more than 2^31 elements together: (rows, columns, dtype) and what is computed of them.
ROWS = 2**31 // 4096 + 3
LARGE = {
    "act_mul": lambda x: ops.act_mul(x, x, "relu"),
    "bias_act": lambda x: ops.bias_act(x, x[0], activation="relu"),
    "bias_act of channels": lambda x: ops.bias_act(x[:, :, None], x[0], activation="relu", dim=1)[..., 0],
    "combine_act": lambda x: ops.multiply_relu(x, x[:, :1]),
    "layer_norm_act": lambda x: ops.layer_norm_act(x, 4096),
    "rms_norm_act": lambda x: ops.rms_norm_act(x, 4096, residual=x),
    "group_norm_act": lambda x: ops.group_norm_act(x, 32, activation="silu"),
    "scale_shift_act": lambda x: ops.scale_shift_act(x, x[0].float(), x[1].float(), "relu"),
    "batch_norm_act": lambda x: ops.batch_norm_act(x, x[0], x[1].abs() + 1, activation="relu"),
    "prelu_bias": lambda x: ops.prelu_bias(x, x[0], x[1]),
    "softmax": lambda x: ops.softmax(x, -1, 0.5, x[0]),
    "reduce": lambda x: torch.stack((ops.reduce_sum_squared(x, -1), ops.reduce_mean_abs(x, -1)), 1),
    "quantize_int8": lambda x: ops.quantize_int8(x, 0.02),
    "rope": lambda x: ops.rope(x, x[0], x[1]),
}


@pytest.mark.cuda
@pytest.mark.gpu_memory(30)
@pytest.mark.parametrize("name", LARGE)
def test_more_elements_than_32_bits_count(name):
    x = torch.randn(64, 4096, device="cuda", dtype=torch.float16).repeat(ROWS // 64 + 1, 1)[:ROWS]
    y = LARGE[name](x)
    for part in (slice(0, 2), slice(ROWS // 2, ROWS // 2 + 2), slice(ROWS - 2, ROWS)):
        rows = torch.cat((x[:2], x[part]))  # whose first ones have the other arguments
        found, expected = y[part], LARGE[name](rows)[2:]
        if name == "group_norm_act":  # few rows have another kernel, which adds up in another order
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5)
        else:
            assert torch.equal(found, expected)


GRADIENTS_OF_LARGE = ["act_mul", "bias_act", "layer_norm_act", "rms_norm_act", "group_norm_act", "softmax", "reduce"]


@pytest.mark.cuda
@pytest.mark.gpu_memory(60)
@pytest.mark.parametrize("name", GRADIENTS_OF_LARGE)
def test_gradients_of_more_elements_than_32_bits_count(name):
    found = []
    x = torch.randn(64, 4096, device="cuda", dtype=torch.float16).repeat(ROWS // 64 + 1, 1)[:ROWS]
    for rows in (x, torch.cat((x[:2], x[-2:]))):
        leaf = rows.detach().requires_grad_()
        y = LARGE[name](leaf)
        (gradient,) = torch.autograd.grad(y, leaf, torch.ones_like(y[:1, :1]).expand_as(y))
        found.append(gradient[-2:].clone())
    torch.testing.assert_close(*found)


# Of two tensors, each pair of these.
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 2.0, -2.0, 60000.0, -60000.0, 1e-30]
OF_PAIRS = {name: getattr(ops, name) for name in ELEMENTWISE} | {
    f"act_mul {act}": lambda x, y, act=act: ops.act_mul(x, y, act) for act in ops.ACTIVATIONS
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(device, dtype):
    """As ATen in float64, and not in the same dtype, in which its vectorised GELU makes a NaN of an infinity."""
    x, y = torch.cartesian_prod(*[torch.tensor(SPECIAL, device=device, dtype=dtype)] * 2).t().contiguous()
    for name, function in OF_PAIRS.items():
        operator, _, activation = name.partition(" ")
        definition = getattr(reference, operator)
        want = definition(x.double(), y.double(), *([activation] if activation else []))
        with describing(name):
            torch.testing.assert_close(function(x, y), want.to(dtype), equal_nan=True)
    x = torch.tensor([*SPECIAL, -1e-30, 6.0, -3.0, 3.0] * 5, device=device, dtype=dtype)
    for act in ops.ACTIVATIONS:
        with describing("bias_act", act):
            want = ops.apply_activation(x.double(), act).to(dtype)
            torch.testing.assert_close(ops.bias_act(x, activation=act), want, equal_nan=True)
