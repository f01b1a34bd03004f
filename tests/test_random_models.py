"""Random models, converted: they equal their originals in every way, or were left alone with a reason; and go on to,
when weights, attributes, classes, hooks, adapters and modes change between calls, in any order and in any thread.

KFCONVERT_FUZZ=5000 tries so many other models than the ordinary run, which always tries the same 25, or 100 of the
exhaustive one.
"""

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import selection
from support.model_equivalence import assert_converts, treatments
from support.random_models import (
    Description,
    Input,
    Step,
    build,
    call_arguments,
    descriptions,
    example_values,
    model_inputs,
)

COUNT = int(os.environ.get("KFCONVERT_FUZZ", 0))
_LINEAR = {"features": 4, "bias": True}


@settings(
    max_examples=COUNT or (100 if selection.EXHAUSTIVE else 25),
    derandomize=not COUNT,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(descriptions(), treatments(10 if COUNT else 4), st.booleans())
def test_a_random_model_converts(description, treated, adapted):
    assert_converts(description, treated, adapted)


def test_the_float64_twin_has_no_other_real_numbers():
    halved = Description((Input("ids"),), (Step("number", options={"kind": "half"}), Step("linear", (1,), _LINEAR)))
    for exact, dtype in ((False, torch.float32), (True, torch.float64)):
        model = build(halved, exact)
        assert model(*model_inputs(halved, exact=exact)).dtype is dtype
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_a_model_accepts_its_example_without_the_optional_argument():
    # The view in transposed_linear takes the second input as it is drawn, but not the one made from the first.
    rows = (Input("signal", "transposed"), Input("signal"))
    described = Description(rows, (Step("linear", (1,), _LINEAR),), packed="optional")
    first, second = example_values(described)
    assert torch.equal(second, first * 2) and second.stride() == first.stride()
    build(described)(*call_arguments(described, model_inputs(described)))
