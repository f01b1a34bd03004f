"""Models that a conversion once got wrong, found by tests/test_random_models.py; one line says what went wrong."""

import copy
from unittest.mock import patch

import pytest
import torch
from support.model_equivalence import assert_converts
from support.random_models import Description, Input, Step
from support.selection import exhaustive
from torch import Tensor, nn

from kfconvert import ModelConverter
from kfconvert.conversion.layouts import Layouts

_CONV = {
    "features": 4, "kernel": 3, "stride": 1, "padding": 1, "dilation": 1, "grouped": False, "bias": False,
    "mode": "zeros",
}  # fmt: skip
FOUND: dict[str, Description] = {
    # A strided image that is returned as it came was returned as a contiguous copy.
    "input_returned": Description(
        inputs=(Input("image"),),
        steps=(Step("conv2d", options=_CONV), Step("batch_norm", (1,), {"affine": False, "tracked": True})),
        outputs=(2, 0),
    ),
    # The norm with a weight was judged by what the one without a weight computes from another input.
    "two_kinds_of_norm": Description(
        inputs=(Input("signal"),),
        steps=(
            Step("square_linear", options={"bias": False}),
            Step("binary", (1, 1), {"kind": "mul"}),
            Step("layer_norm", (2,), {"last": 1, "affine": True, "bias": False}),
            Step("layer_norm", (1,), {"last": 1, "affine": False, "bias": False}),
        ),
        outputs=(4, 3),
    ),
    # The norm of a transposed input was transposed, where the original's is contiguous: a write into a view failed.
    "norm_of_transposed": Description(
        inputs=(Input("sequence", "transposed"),),
        steps=(
            Step("batch_norm", options={"affine": False, "tracked": True}),
            Step("batch_norm", (1,), {"affine": False, "tracked": True}),
            Step("activation", (2,), {"form": ("relu", "functional")}),
            Step("view", (3,), {"kind": "stride"}),
            Step("binary_", (4, 3), {"kind": "assign"}),
        ),
        outputs=(5,),
    ),
    # The converted model was judged on a strided input, the original on a contiguous copy.
    "strided_example": Description(
        inputs=(Input("sequence", "strided"),),
        steps=(Step("batch_norm", options={"affine": False, "tracked": False}),),
        outputs=(1,),
        dtype="bfloat16",
    ),
    # A model that casts by itself was its own truth: the zeros of a norm over one value were wrong beside its rounding.
    "norm_of_one_value_cast": Description(
        inputs=(Input("ids"), Input("ids")),
        steps=(
            Step("number", (1,), {"kind": "add"}),
            Step("cast", (2,), {"dtype": "float16"}),
            Step("linear", (3,), {"features": 1, "bias": False}),
            Step("linear", (4,), {"features": 6, "bias": False}),
            Step("linear", (5,), {"features": 6, "bias": False}),
            Step("square_linear", (4,), {"bias": False}),
            Step("layer_norm", (7,), {"last": 1, "affine": True, "bias": False}),
        ),
        outputs=(8, 5),
        packed="optional",
        form="dict",
    ),
    # Its largest error on four inputs was by chance twice the original's, its mean error smaller: nothing was fused.
    "unlucky_largest_error": Description(
        inputs=(Input("image"),),
        steps=(
            Step("linear", options={"features": 4, "bias": True}),
            Step("activation", (1,), {"form": ("hardswish", "written")}),
            Step(
                "conv2d", (2,), {**_CONV, "kernel": 2, "padding": 2, "dilation": 2, "bias": True, "mode": "replicate"}
            ),
            Step("batch_norm", (3,), {"affine": True, "tracked": False}),
            Step("activation_", (4,), {"form": ("leaky_relu", "in_place")}),
            Step("parameter", (5,), {"use": "add"}),
            Step("linear", (6,), {"features": 6, "bias": True}),
            Step("activation", (7,), {"form": ("relu", "functional")}),
        ),
        outputs=(8,),
        packed="arguments",
        form="tuple",
        dtype="bfloat16",
    ),
    # What contiguous() made of the example, the example itself, was returned for strided inputs as well.
    "contiguous_input": Description(
        inputs=(Input("sequence"),), steps=(Step("copy", options={"kind": "contiguous"}),), outputs=(1,)
    ),
    # In channels-last the statistics of the batch had three times the error.
    "statistics_in_channels_last": Description(
        inputs=(Input("image"),),
        steps=(
            Step("conv2d", options={**_CONV, "kernel": 1, "padding": 0, "grouped": True, "bias": True}),
            Step("conv2d", (1,), {**_CONV, "kernel": 1, "padding": 0, "grouped": True, "bias": True}, like=0),
            Step("batch_norm", (2,), {"affine": False, "tracked": False}),
        ),
        outputs=(3,),
    ),
    # Next to what it doubles in place, a column, a tensor of its own was made, of which ATen's GELU is less accurate.
    "column_written": Description(
        inputs=(Input("rows"),),
        steps=(
            Step("view", options={"kind": "transpose"}),
            Step("linear", (1,), {"features": 8, "bias": True}),
            Step("view", (2,), {"kind": "unbind"}),
            Step("number_", (3,), {"kind": "mul_"}),
            Step("activation", (4,), {"form": ("gelu", "functional")}),
        ),
        outputs=(5,),
    ),
}


# The others are accidents of rounding, which random models meet as well.
SHORT = ["input_returned", "two_kinds_of_norm", "norm_of_transposed", "strided_example", "contiguous_input"]


@pytest.mark.parametrize("name", [*SHORT, *exhaustive(*(name for name in FOUND if name not in SHORT))])
def test_found(name):
    assert_converts(FOUND[name])


class _Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)


class AddsSize(nn.Module):
    """A size that is added before a norm or after a convolution was taken for a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(6), nn.Conv1d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + x.shape[1])
        return torch.relu(self.conv(x.transpose(1, 2)) + x.shape[0])


class BatchStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, track_running_stats=False)
        with torch.no_grad():
            self.conv.weight.mul_(1e-3)
            self.conv.bias.add_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(torch.relu(self.conv(x)))


def test_batch_statistics_are_as_accurate_in_channels_last():
    model, x = BatchStatistics().eval(), torch.randn(2, 8, 32, 32)
    with patch.object(Layouts, "_select_layout", lambda self, captured: self._lay_out(captured, channels_last=True)):
        converter = ModelConverter(select="all")
        converted = converter.convert_model(model, example_inputs=x)
    assert converter.conversion_stats["layout"] == "channels_last"
    assert converter.conversion_stats["total_replaced"] == 1
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        errors = [(outputs.double() - exact).abs().max().item() for outputs in (model(x), converted(x))]
    assert errors[1] < 1.5 * errors[0]


def test_a_size_is_no_residual():
    model = AddsSize().eval()
    converted = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        model, input_shape=(3, 5, 6)
    )
    x = torch.randn(2, 5, 6)
    with torch.no_grad():
        torch.testing.assert_close(converted(x), model(x))


class SigmoidBeforeWrite(_Linear):
    """x * sigmoid(x) was taken for silu although x is written, through a view, between the two."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        column = x[:, 0]
        gate = torch.sigmoid(x)
        column.add_(1.0)
        return x * gate


class AddmmBeforeWrite(_Linear):
    """view, addmm, view was taken for a linear at the place of the last view, after a write to its input."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        rows = x.view(-1, 6)
        column = rows[:, 0]
        product = torch.addmm(self.linear.bias, rows, self.linear.weight)
        column.add_(1.0)
        return product.view(x.shape) + x


class WriteThroughTypeAs(_Linear):
    """type_as returns its argument, which its schema does not tell: the write to the model's input was lost."""

    def forward(self, x: Tensor) -> Tensor:
        same = x.type_as(x)
        same.add_(1.0)
        return self.linear(same)


class WriteThroughEinsum(_Linear):
    """einsum of one operand is a view, which its schema does not tell."""

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.einsum("ab->ba", x)
        turned.mul_(2.0)
        return torch.relu(self.linear(x))


class MaskWritten(_Linear):
    """A mask that is true everywhere when it is made was dropped although it is written afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(6) >= 0
        mask[2:] = False
        x = self.linear(x).unsqueeze(1)
        x = x.transpose(-1, -2)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask.expand(6, 6))


class WriteThroughFlattenedImage(nn.Module):
    """With the convolution in channels-last the flattened image is a copy, and the write to it was lost."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        image = torch.relu(self.bn(self.conv(x))) + 1
        image.view(image.shape[0], -1).mul_(2.0)
        return image


WRITES = {
    SigmoidBeforeWrite: (3, 6),
    AddmmBeforeWrite: (3, 6),
    WriteThroughTypeAs: (3, 6),
    WriteThroughEinsum: (3, 6),
    MaskWritten: (3, 6),
    WriteThroughFlattenedImage: (2, 4, 6, 6),
}


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("kind", WRITES)
def test_a_write_in_place_is_seen_where_the_original_sees_it(kind):
    model = kind().eval()
    # The validation on the example would hide most of these.
    converter = ModelConverter(validate_accuracy=False, select="all")
    converted = converter.convert_model(model, input_shape=WRITES[kind])
    for batch in (1, 2, 5):
        ours, theirs = (torch.randn(batch, *WRITES[kind][1:], generator=torch.Generator().manual_seed(1)) for _ in "ab")
        with torch.no_grad():
            torch.testing.assert_close(converted(theirs), model(ours))
        assert torch.equal(theirs, ours)
