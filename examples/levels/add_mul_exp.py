"""The lesson of elementwise functions: memory traffic determines time, and a fused kernel moves each byte once."""

import torch
from torch import Tensor

from kfconvert import kernels

from .definition import Lesson


def native(x: Tensor, y: Tensor) -> Tensor:
    """Computes ``exp((x + y) * 2)``, x and y of one shape."""
    return torch.exp((x + y) * 2.0)


LESSON = Lesson(
    name="add_mul_exp",
    formula="exp((x + y) * 2)",
    learned="three calls move seven tensors through memory, one kernel moves three",
    sizes={"small": {"elements": 2**18}, "full": {"elements": 2**24}},
    inputs=lambda normal, elements: (normal(elements) / 4, normal(elements) / 4),
    native=native,
    operators=None,
    triton=lambda: kernels.triton.add_mul_exp,
    kernel=lambda family: family.add_mul_exp,
)
