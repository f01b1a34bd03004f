"""Random models, converted: they equal their originals in every way, or were left alone with a reason.

KFCONVERT_FUZZ=5000 tries so many other models than the ordinary run, which always tries the same ones.
"""

import gc
import os

import pytest
from hypothesis import HealthCheck, given, settings
from model_equivalence import assert_converts
from random_models import descriptions

COUNT = int(os.environ.get("KFCONVERT_FUZZ", 0))


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Every validation collects garbage: half a second where all of PyTorch is looked through, nothing where not."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@settings(
    max_examples=COUNT or 200,
    derandomize=not COUNT,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(descriptions())
def test_a_random_model_converts(description):
    assert_converts(description)
