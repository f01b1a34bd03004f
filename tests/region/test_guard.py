"""Call forms and guards: which later calls a captured region may serve."""

import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy.functions import Max, Min

from kfconvert import ModelConverter
from kfconvert.capture.tracer import trace
from kfconvert.inputs.call_form import CallForm
from kfconvert.inputs.example import ExampleCall, InputError, example_call
from kfconvert.region import guard
from kfconvert.region.guard import _holds
from kfconvert.region.region import CaptureError
from kfconvert.runtime.state import watch


def nested(first, second):
    pass


def forward(ids, mask=None, scale=1.0, *, flag=True):
    pass


IDS, MASK = torch.zeros(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((IDS, MASK), {}),
        ((IDS,), {"mask": MASK}),
        ((), {"ids": IDS, "mask": MASK}),
        ((), {"mask": MASK, "ids": IDS}),
        ((IDS, MASK, 1.0), {"flag": True}),
    ],
)
def test_one_form_for_all_spellings_of_a_call(args, kwargs):
    leaves = CallForm(forward, (IDS,), {"mask": MASK}).leaves(args, kwargs)
    assert leaves[0] is IDS and leaves[1] is MASK


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((IDS,), {}),
        ((IDS, MASK, 2.0), {}),
        ((IDS, MASK), {"flag": False}),
        ((IDS, MASK), {"other": 1}),
        ((IDS, (MASK, MASK)), {}),
        ((IDS, MASK, 1.0, None, None), {}),
        ((IDS, MASK), {"mask": MASK}),
    ],
)
def test_other_arguments_are_another_form(args, kwargs):
    assert CallForm(forward, (IDS,), {"mask": MASK}).leaves(args, kwargs) is None


def test_spellings_seen_before_are_judged_by_their_values_again():
    form = CallForm(forward, (IDS,), {"mask": MASK})
    for _ in range(2):
        assert form.leaves((IDS, MASK, 1.0), {}) == [IDS, MASK]
        assert form.leaves((IDS, MASK, 2.0), {}) is None
        assert form.leaves((IDS,), {"other": 1}) is None
        assert form.leaves((IDS, (MASK, MASK)), {}) is None
    for number in range(1000):
        assert form.leaves((IDS,), {"mask": MASK, f"other{number}": 1}) is None
    assert len(form._orders) <= 100 and form.leaves((), {"mask": MASK, "ids": IDS}) == [IDS, MASK]


def test_nested_arguments_are_flattened():
    form = CallForm(forward, ((IDS, MASK),), {})
    assert form.leaves(((IDS, MASK),), {})[1] is MASK
    assert form.leaves(([IDS, MASK],), {}) is None


@pytest.mark.parametrize("bare", [IDS, 1.5, None], ids=["tensor", "number", "None"])
def test_a_container_of_one_value_is_not_that_value(bare):
    spelled = [bare, [bare], (bare,), {"a": bare}, {"b": bare}, [[bare]]]
    for known in spelled:
        form = CallForm(nested, (known, IDS), {})
        for other in spelled:
            assert (form.leaves((other, IDS), {}) is not None) == (other is known)


def test_containers_of_other_lengths_make_up_for_each_other():
    form = CallForm(nested, ([], [IDS, MASK]), {})
    assert form.leaves(([], [IDS, MASK]), {}) is not None
    for other in ((IDS, MASK), ([IDS], [MASK]), ([IDS, MASK], [])):
        assert form.leaves(other, {}) is None


class Flattens(nn.Module):
    """The middle size is fixed by the weight, the others are free."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x, shift=0.0):
        return self.linear(x) + shift


class OddIsSpecial(nn.Module):
    def forward(self, x):
        return x + 1 if x.shape[0] % 2 else x - 1


class LimitedLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.register_buffer("table", torch.randn(8, 4))

    def forward(self, ids):
        return self.embedding(ids) + self.table[: ids.shape[1]]


@pytest.fixture(params=["compiled", "python"])
def implementation(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(guard, "_tensor_key", lambda leaves, indices: None)
    elif not watch.COMPILED:
        pytest.skip("kfconvert._C was not built for this Python")


def region_of(model, *inputs, **kwargs):
    return trace(model.eval(), ExampleCall(inputs, kwargs))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    "value, reason",
    [
        (torch.zeros(5, 6), None),
        (torch.zeros(5, 7), "size 7 in dimension 1"),
        (torch.zeros(5, 6).double(), "dtype"),
        (torch.zeros(5, 6, 1), "3 dimensions"),
        (torch.zeros(0, 6), "below the traced minimum"),
        (torch.zeros(1, 6), "below the traced minimum"),
        ([1.0], "not a plain tensor"),
        (torch.zeros(5, 6, device="meta"), "on meta"),
        (torch.zeros(5, 6).to_sparse(), "sparse"),
    ],
    ids=str,
)
def test_tensor_guard(value, reason):
    guard = region_of(Flattens(), torch.randn(4, 6)).guard
    for _ in range(2):  # the second time it is looked up
        refusal = guard.refusal([value])
        assert refusal is None if reason is None else reason in refusal


def test_constant_arguments_are_part_of_the_trace():
    guard = region_of(Flattens(), torch.randn(4, 6), shift=2.0).guard
    assert guard.refusal([torch.zeros(3, 6), 2.0]) is None
    assert "2.5" in guard.refusal([torch.zeros(3, 6), 2.5])


def test_conditions_found_while_tracing_are_checked():
    guard = region_of(OddIsSpecial(), torch.randn(4, 6)).guard
    assert guard.refusal([torch.zeros(6, 6)]) is None
    assert "condition" in guard.refusal([torch.zeros(7, 6)])


def test_upper_bound_of_a_free_size():
    guard = region_of(LimitedLength(), torch.zeros(2, 5, dtype=torch.long)).guard
    assert guard.refusal([torch.zeros(3, 8, dtype=torch.long)]) is None
    assert guard.refusal([torch.zeros(3, 9, dtype=torch.long)]) is not None


@pytest.mark.usefixtures("implementation")
def test_two_inputs_share_the_batch_size():
    class Adds(nn.Module):
        def forward(self, x, y):
            return x + y

    guard = region_of(Adds(), torch.randn(4, 6), torch.randn(4, 6)).guard
    assert guard.refusal([torch.zeros(3, 6), torch.zeros(3, 6)]) is None
    assert guard.refusal([torch.zeros(3, 6), torch.zeros(5, 6)]) is not None


def test_what_cannot_be_exported_says_why():
    class DataDependent(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(CaptureError, match="torch.export"):
        region_of(DataDependent(), torch.randn(4, 6))


@pytest.mark.parametrize("shape", [(), (0, 3), (-1, 3), 5], ids=str)
def test_impossible_shapes(shape):
    with pytest.raises(InputError):
        example_call(Flattens(), shape, None, torch.device("cpu"), None)


def test_exactly_one_description_of_the_inputs():
    for shape, inputs in ((None, None), ((1, 6), torch.zeros(1, 6))):
        with pytest.raises(InputError, match="exactly one"):
            example_call(Flattens(), shape, inputs, torch.device("cpu"), None)


def test_a_model_that_starts_with_an_embedding_receives_integers():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    (ids,) = example_call(model, (2, 7), None, torch.device("cpu"), torch.float16).args
    assert ids.dtype is torch.int64 and ids.shape == (2, 7) and 0 <= ids.min() and ids.max() < 10


class TwoBatches(nn.Module):
    """Looks up in the mask by the batch of the ids: nothing in the graph makes the two batch sizes equal."""

    def forward(self, ids, mask):
        return mask[torch.arange(ids.shape[0])] * ids


def test_free_sizes_of_one_name_stay_equal():
    ids, mask = torch.ones(4, 6, dtype=torch.long), torch.ones(4, 6, dtype=torch.long)
    guard = region_of(TwoBatches(), ids, mask).guard
    assert guard.refusal([ids[:3], mask[:3]]) is None
    assert "disagree on the batch size" in guard.refusal([ids[:3], mask])


def test_subgraphs_of_a_region_are_carried_along():
    class WithGradients(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            with torch.enable_grad():
                scale = x.abs().amax()
            return torch.relu(self.linear(x)) / scale

    model, converter = WithGradients().eval(), ModelConverter(select="all")
    fused = converter.convert_model(model, input_shape=(4, 6))
    assert converter.conversion_stats["linear_relu_replaced"] == 1
    x = torch.randn(3, 6)
    torch.testing.assert_close(fused(x), model(x))


@pytest.mark.skipif(not watch.COMPILED, reason="kfconvert._C was not built for this Python")
def test_the_key_of_tensors_tells_dtype_and_shape():
    x = torch.zeros(2, 3)
    others = [x.double(), x.int(), x.half(), x.bfloat16(), x.t(), x[None], x.bool(), torch.zeros(()), torch.zeros(6)]
    bytes_ = torch.zeros(2, 3, dtype=torch.uint8)
    others += [bytes_, bytes_.view(torch.uint4), bytes_.view(torch.uint1), bytes_.view(torch.float8_e4m3fn)]
    keys = [guard._tensor_key([0, value], (1,)) for value in (x, *others)]
    assert None not in keys and len(set(keys)) == len(keys)
    alike = (nn.Parameter(x), x.clone(), torch.zeros(4, 6)[::2, ::2], torch.ones(2, 3, requires_grad=True))
    assert {guard._tensor_key([value], (0,)) for value in alike} == {keys[0]}
    assert guard._tensor_key([x, x], (0, 1)) != keys[0]
    assert guard._tensor_key([], ()) == b""


@pytest.mark.skipif(not watch.COMPILED, reason="kfconvert._C was not built for this Python")
def test_what_is_no_plain_tensor_has_no_key():
    class Subclass(torch.Tensor):
        pass

    x, many = torch.zeros(2, 3), torch.zeros([1] * 64)
    for leaves in ([x.as_subclass(Subclass), x], [x.to_sparse(), x], [None, x], [x, 1], [many, many]):
        assert guard._tensor_key(leaves, (0, 1)) is None
    with pytest.raises(TypeError):
        guard._tensor_key((x,), (0,))
    for index, error in ((1, IndexError), (-1, IndexError), ("0", TypeError)):
        with pytest.raises(error):
            guard._tensor_key([x], (index,))


def test_a_condition_that_all_sizes_meet_is_none():
    """PyTorch 2.11 leaves it to whoever asks which of two multiples of a size is the smaller one."""
    size = sympy.Symbol("s", positive=True, integer=True)
    assert _holds(sympy.Eq(Min(8 * size, 16 * size), 8 * size)) and _holds(sympy.Eq(Max(1, 2 * size), 2 * size))
    assert not _holds(sympy.Eq(Min(8 * size, 64), 8 * size)) and not _holds(size > 3)
