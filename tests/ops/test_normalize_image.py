"""normalize_image against its definition, torchvision's ToTensor and Normalize, and against float64."""

import pytest
import torch
from helpers import DTYPES
from support.accuracy import assert_as_accurate

from kfconvert import ops
from kfconvert.kernels import reference

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FORMATS = (torch.contiguous_format, torch.channels_last)


def bytes_of(*shape, device="cpu"):
    return torch.randint(0, 256, shape, device=device, dtype=torch.uint8)


def numbers(channels):
    """A mean and a std for each channel: those of ImageNet, and more."""
    mean = [MEAN[c] if c < 3 else 0.3 + 0.1 * (c % 4) for c in range(channels)]
    return mean, [STD[c] if c < 3 else 0.2 + 0.1 * (c % 5) for c in range(channels)]


def check(image, mean, std, dtype, memory_format):
    """The result, in the given format and as accurate as the definition."""
    y = ops.normalize_image(image, mean, std, dtype=dtype, memory_format=memory_format)
    truth = reference.normalize_image(image, mean, std, dtype=torch.float64)
    assert_as_accurate(y, reference.normalize_image(image, mean, std, dtype=dtype, memory_format=memory_format), truth)
    planes = y.movedim(-3, -1) if memory_format == torch.channels_last else y
    assert planes.is_contiguous()
    return y


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(device, dtype, memory_format):
    batch = bytes_of(3, 24, 40, 4, device=device)
    colours = bytes_of(3, 24, 40, 3, device=device)
    for image in (
        colours[..., 10:20, :], colours[:, 3:11, 8:24], colours[:, 4:, 1:], colours[1, :, 8:16], colours[1:2, 5:6, 7:8],
        colours[::2], colours[:, ::2, ::3], colours[:, :, 7:8], colours[:, 7:8], colours.transpose(1, 2),
        batch[..., :3], batch[..., 1:2], batch[..., 8:16, :], batch.permute(0, 2, 3, 1)[..., :3],
        colours[0].expand(2, 24, 40, 3), colours[:, :1].expand(3, 5, 40, 3), colours[:, :, :1].expand(3, 24, 8, 3),
        batch[..., :1].expand(3, 24, 40, 3), bytes_of(3, 8, 16, device=device).permute(1, 2, 0),
        bytes_of(24 * 40 * 3 + 1, device=device)[1:].view(24, 40, 3),
    ):  # fmt: skip
        y = check(image, *numbers(image.shape[-1]), dtype, memory_format)
        dense = ops.normalize_image(image.contiguous(), *numbers(image.shape[-1]), dtype=dtype)
        assert torch.equal(y, dense)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_error_of_every_byte(device, memory_format, tensors):
    image = torch.arange(256, device=device).to(torch.uint8).reshape(16, 16, 1).expand(16, 16, 3)
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-15)):
        for mean, std in (
            (MEAN, STD), ((0, 0, 0), (1, 1, 1)), ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), ((-0.3, 3, 120), (-0.3, 1e-3, 60)),
        ):  # fmt: skip
            mean, std = (torch.tensor(value, device=device, dtype=dtype) for value in (mean, std))
            given = (mean, std) if tensors else (mean.tolist(), std.tolist())
            y = ops.normalize_image(image, *given, dtype=dtype, memory_format=memory_format)
            plain = reference.normalize_image(image, *given, dtype=dtype)
            largest = ((1 + mean.abs()) / std.abs()).reshape(3, 1, 1)
            assert ((y - plain).abs() <= bound * largest).all()


def test_definition_is_that_of_torchvision():
    transforms = pytest.importorskip("torchvision.transforms")
    image = bytes_of(9, 7, 3)
    theirs = transforms.Normalize(MEAN, STD)(transforms.ToTensor()(image.numpy()))
    for memory_format in FORMATS:
        assert torch.equal(reference.normalize_image(image, MEAN, STD, memory_format=memory_format), theirs)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_crop_and_flip(device, dtype, memory_format):
    for image in (bytes_of(20, 30, 3, device=device), bytes_of(2, 20, 30, 3, device=device)):
        whole = ops.normalize_image(image, MEAN, STD, dtype=dtype)
        for top, left, height, width in ((0, 0, 20, 30), (3, 5, 10, 16), (19, 29, 1, 1), (4, 7, 0, 5)):
            part = whole[..., top : top + height, left : left + width]
            for flip in (False, True):
                options = {"crop": (top, left, height, width), "flip": flip, "memory_format": memory_format}
                y, plain = (p.normalize_image(image, MEAN, STD, dtype=dtype, **options) for p in (ops, reference))
                want = part.flip(-1) if flip else part
                assert torch.equal(y, want)
                torch.testing.assert_close(plain, want)
                torch.testing.assert_close(y, want)
                planes = y.movedim(-3, -1) if memory_format == torch.channels_last else y
                assert planes.is_contiguous()
        assert torch.equal(ops.normalize_image(image, MEAN, STD, dtype=dtype, flip=True), whole.flip(-1))


def test_crop_is_that_of_torchvision():
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    image = bytes_of(9, 7, 3)
    theirs = functional.hflip(functional.crop(image.movedim(-1, 0), 2, 1, 5, 4)).float() / 255
    ours = ops.normalize_image(image, (0, 0, 0), (1, 1, 1), crop=(2, 1, 5, 4), flip=True)
    torch.testing.assert_close(ours, theirs)


def test_batches_are_channels_last(device, compiled):
    y = ops.normalize_image(bytes_of(2, 4, 6, 3, device=device), MEAN, STD, memory_format=torch.channels_last)
    assert y.is_contiguous(memory_format=torch.channels_last) and y.stride() == (72, 1, 18, 3)
    y = ops.normalize_image(bytes_of(4, 6, 3, device=device), MEAN, STD, memory_format=torch.channels_last)
    assert y.stride() == (1, 18, 3)


def test_tensors_are_numbers(device, compiled):
    mean, std = (torch.tensor(value, device=device, requires_grad=True) for value in (MEAN, STD))
    assert not ops.normalize_image(bytes_of(4, 8, 3, device=device), mean, std).requires_grad
    y = ops.normalize_image(bytes_of(4, 8, 3, device=device), mean, torch.zeros(3, device=device))
    assert not y.isfinite().any()
