"""normalize_image: converts images of bytes to normalized floats, in one pass over memory."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..arguments import as_integer, as_number
from ..declaration import declare
from ..registration import define, has_kernels, require, require_float, require_same_device, require_shape

__all__ = ["normalize_image"]

# Up to this number of channels, mean and std are scalars in the call (kFewChannels in csrc/common/arguments.h), else
# tensors.
_FEW_CHANNELS = 4


@declare(group="image", example=lambda t, rows, columns: (t(2, rows, 6, 3).to(torch.uint8), (0.5,) * 3, (0.2,) * 3))
def normalize_image(
    image: Tensor,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    *,
    crop: tuple[int, int, int, int] | None = None,
    flip: bool = False,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Computes ``(image / 255 - mean) / std`` for each channel, channels first: torchvision's ToTensor and Normalize.

    Args:
        image: (H, W, C) or (N, H, W, C), uint8; any strides are read without a copy.
        mean, std: C numbers each, or (C,) on image's device. For more than 4 channels, numbers are copied to the
            device in every call.
        crop: (top, left, height, width) in pixels: the part of each image to read, without a copy.
        flip: mirror left and right; ``torch.flip`` copies the bytes.
        dtype: dtype of the result: float64, float32, float16 or bfloat16 (half types are computed in float32).
        memory_format: format of the result: ``torch.contiguous_format``, or ``torch.channels_last``, in which a
            result of three dimensions has the strides of (H, W, C).

    Returns:
        (C, H, W) or (N, C, H, W), with H and W of ``crop`` if given.

    The kernels compute one multiply-add, ``image * scale + shift`` with ``scale = 1 / (255 std)`` and
    ``shift = -mean / std``. In float32 the result is within 1e-6 of the definition (in float64 1e-15), relative to
    the largest possible result, ``(1 + |mean|) / |std|``. Not differentiable.

    Raises:
        RuntimeError: incompatible shapes, dtypes, devices, crop or memory format; a number 0 in std. Values of a
            tensor are not checked: if std is 0, no result is finite.
    """
    operator = "normalize_image"
    require(image.dtype == torch.uint8, operator, "expected uint8")
    shape = tuple(image.shape)
    require(len(shape) in (3, 4), operator, f"image has shape {shape}, expected (H, W, C) or (N, H, W, C)")
    image = _part_of(image, crop, flip)
    known = memory_format in (torch.contiguous_format, torch.channels_last)
    require(known, operator, "memory_format must be torch.contiguous_format or torch.channels_last")
    empty = image.new_empty(0, dtype=dtype)
    require_float(operator, empty)
    mean, std = (_checked(operator, name, value, image) for name, value in (("mean", mean), ("std", std)))
    require(isinstance(std, Tensor) or 0 not in std, operator, "std has a value of 0")
    if not has_kernels(image):
        return _normalised(image, mean, std, dtype, memory_format == torch.channels_last)
    channels_last = memory_format == torch.channels_last
    if isinstance(mean, Tensor) or isinstance(std, Tensor) or len(mean) > _FEW_CHANNELS:
        return _OPERATOR(image, *_tensors(image, dtype, mean, std), [], [], empty, channels_last)
    return _OPERATOR(image, None, None, mean, std, empty, channels_last)


def _checked(operator, name, value, image):
    """Checks ``value`` and returns a tensor or a list of numbers, one per channel of image."""
    channels = image.shape[-1]
    if isinstance(value, Tensor):
        require_same_device(operator, name, image, value, "image")
        require_shape(operator, name, value, (channels,))
        return value.detach()
    require(isinstance(value, Iterable), operator, f"{name} must be numbers or a tensor, got {value}")
    value = [as_number(operator, name, number) for number in value]
    count = len(value)
    require(count == channels, operator, f"{name} has {count} values, but image has {channels} channels")
    return value


def _tensors(image, dtype, *values):
    """Returns each value as a tensor (C,), in the computation dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return [torch.as_tensor(value, dtype=wide, device=image.device) for value in values]


def _part_of(image: Tensor, crop: tuple[int, int, int, int] | None, flip: bool) -> Tensor:
    """Returns the part ``crop`` of (..., H, W, C) as a view, or mirrored with ``flip`` as a copy."""
    operator = "normalize_image"
    if crop is not None:
        if not isinstance(crop, (tuple, list)) or len(crop) != 4:
            raise TypeError(f"kfconvert::{operator}: crop must be (top, left, height, width), got {crop!r}")
        top, left, height, width = (as_integer(operator, "crop", number) for number in crop)
        rows, columns = image.shape[-3:-1]
        inside = 0 <= top <= top + height <= rows and 0 <= left <= left + width <= columns
        require(inside, operator, lambda: f"crop {tuple(crop)} is not inside an image of {rows} x {columns}")
        image = image[..., top : top + height, left : left + width, :]
    return image.flip(-2) if flip else image


def _normalised(image, mean, std, dtype, channels_last):
    """Rounds as torchvision's transforms do: mean, std and each step to float32, or to float64 where that is dtype."""
    means, stds = (value.reshape(-1, 1, 1) for value in _tensors(image, dtype, mean, std))
    planes = image.contiguous().movedim(-1, -3) if channels_last else image.movedim(-1, -3).contiguous()
    return planes.to(means.dtype).div_(255).sub_(means).div_(stds).to(dtype)


def _compose(image, mean, std, mean_values, std_values, like, channels_last):
    values = (mean_values, std_values) if mean is None else (mean, std)
    y = _normalised(image, *values, like.dtype, channels_last)
    return _fake(image, mean, std, mean_values, std_values, like, channels_last).copy_(y)


def _fake(image, mean, std, mean_values, std_values, like, channels_last):
    if channels_last:
        return image.new_empty(image.shape, dtype=like.dtype).movedim(-1, -3)
    return image.new_empty(image.movedim(-1, -3).shape, dtype=like.dtype)


# `like`: an empty tensor with the dtype of the result.
_OPERATOR = define(
    "normalize_image(Tensor image, Tensor? mean, Tensor? std, float[] mean_values, float[] std_values, "
    "Tensor like, bool channels_last) -> Tensor",
    _compose,
    _fake,
)
