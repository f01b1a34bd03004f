"""normalize_image against its definition, torchvision's ToTensor and Normalize, and against float64."""

import pytest
import torch
from helpers import DTYPES
from support.accuracy import assert_as_accurate
from support.selection import pairwise

from kfconvert import ops
from kfconvert.kernels import reference

OPERATORS = torch.ops.kfconvert
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FORMATS = (torch.contiguous_format, torch.channels_last)
# Whole packs of pixels and of elements and others, rows for several threads, channels for more than one block.
SHAPES = [
    (8, 16, 3), (2, 8, 16, 3), (7, 5, 3), (3, 7, 5, 3), (2, 150, 211, 3), (2, 160, 208, 3), (2, 4, 8, 4), (2, 5, 3, 4),
    (2, 4, 8, 1), (3, 5, 7, 1), (2, 6, 4, 2), (2, 3, 4, 5), (1, 2, 3, 1100), (1, 1, 3), (2, 1, 1, 3), (2, 1, 8, 3),
    (2, 8, 1, 3), (0, 4, 8, 3), (2, 0, 8, 3), (2, 4, 8, 0),
]  # fmt: skip


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


@pairwise(memory_format=FORMATS, dtype=DTYPES, shape=SHAPES)
def test_shapes(device, shape, dtype, memory_format):
    image = bytes_of(*shape, device=device)
    mean, std = numbers(shape[-1])
    given = check(image, mean, std, dtype, memory_format)
    assert given.shape == (*shape[:-3], shape[-1], *shape[-3:-1])
    tensors = [torch.tensor(value, device=device, dtype=torch.float64) for value in (mean, std)]
    for values in (tensors, (mean, tensors[1]), (tensors[0], std)):
        torch.testing.assert_close(check(image, *values, dtype, memory_format), given)


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


def test_errors_of_crop(device, compiled):
    image = bytes_of(4, 8, 3, device=device)
    for crop in ((0, 0, 5, 8), (0, 1, 4, 8), (-1, 0, 2, 2), (0, 0, -1, 2), (4, 8, 1, 1)):
        with pytest.raises(RuntimeError, match=r"crop \(.*\) is not inside an image of 4 x 8$"):
            ops.normalize_image(image, MEAN, STD, crop=crop)
    for crop in (3, (1, 2), image, "text"):
        with pytest.raises(TypeError, match=r"crop must be \(top, left, height, width\)"):
            ops.normalize_image(image, MEAN, STD, crop=crop)
    for crop in ((0, 0, 2.5, 2), (0, 0, None, 2), (0, 0, True, 2)):
        with pytest.raises(TypeError, match="crop must be an integer"):
            ops.normalize_image(image, MEAN, STD, crop=crop)


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


@pytest.mark.parametrize("memory_format", FORMATS)
def test_opcheck(device, memory_format):
    like, last = torch.empty(0, device=device, dtype=torch.float16), memory_format == torch.channels_last
    mean, std = (torch.tensor(value, device=device) for value in (MEAN, STD))
    for image in (bytes_of(4, 8, 3, device=device), bytes_of(2, 5, 7, 3, device=device)[:, 1:, 2:]):
        for values in ((None, None, MEAN, STD), (mean, std, [], [])):
            torch.library.opcheck(OPERATORS.normalize_image.default, (image, *values, like, last))


def test_errors(device, compiled):
    image = bytes_of(4, 8, 3, device=device)
    ones = torch.ones(4, device=device)
    for call, match in (
        (lambda: ops.normalize_image(image.float(), MEAN, STD), "expected uint8"),
        (lambda: ops.normalize_image(image[0], MEAN, STD), r"shape \(8, 3\), expected \(H, W, C\) or \(N, H, W, C\)"),
        (lambda: ops.normalize_image(image, MEAN, STD, dtype=torch.int32), "expected float64, float32, float16"),
        (lambda: ops.normalize_image(image, MEAN[:2], STD), "mean has 2 values, but image has 3 channels"),
        (lambda: ops.normalize_image(image, MEAN, (*STD, 1)), "std has 4 values, but image has 3 channels"),
        (lambda: ops.normalize_image(image, MEAN, ones), r"std has shape \(4,\), expected \(3,\)"),
        (lambda: ops.normalize_image(image, ones[:3, None], STD), r"mean has shape \(3, 1\), expected \(3,\)"),
        (lambda: ops.normalize_image(image, MEAN, (1, 0, 1)), "std has a value of 0"),
        (
            lambda: ops.normalize_image(image, MEAN, STD, memory_format=torch.channels_last_3d),
            "memory_format must be torch.contiguous_format or torch.channels_last",
        ),
    ):
        with pytest.raises(RuntimeError, match=r"^kfconvert::normalize_image: .*" + match) as error:
            call()
        assert "\n" not in str(error.value)


def test_errors_of_the_kernels(device):
    image = bytes_of(4, 8, 3, device=device)
    many = bytes_of(4, 8, 5, device=device)
    like, ones = torch.empty(0, device=device), torch.ones(3, device=device)
    for arguments, match in (
        ((image.char(), None, None, MEAN, STD, like, False), "expected uint8"),
        ((image[0], None, None, MEAN, STD, like, False), r"image has shape \(8, 3\)"),
        ((image, None, None, MEAN[:2], STD, like, False), "expected a mean and a std for each of 3 channels"),
        ((image, None, None, [], [], like, False), "expected a mean and a std for each of 3 channels"),
        ((many, None, None, [0.5] * 5, [0.5] * 5, like, True), "in tensors for more than 4"),
        ((image, ones, None, [], STD, like, False), "both be tensors or both be numbers"),
        ((image, ones, ones[:2], [], [], like, False), r"std has shape \(2\), expected \(3,\)"),
        ((image, ones, ones.double(), [], [], like, False), "std must be float32"),
        ((image, None, None, MEAN, STD, like.int(), False), "expected float64, float32, float16 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=match):
            OPERATORS.normalize_image(*arguments)


def test_compile(device):
    image, mean = bytes_of(2, 4, 8, 3, device=device), torch.tensor(MEAN, device=device)

    def prepare(image):
        planes = ops.normalize_image(image, MEAN, STD, dtype=torch.bfloat16, memory_format=torch.channels_last)
        return planes, ops.normalize_image(image, mean, STD)

    for mine, eager in zip(torch.compile(prepare, backend="aot_eager", fullgraph=True)(image), prepare(image)):
        assert torch.equal(mine, eager) and mine.stride() == eager.stride()


@pytest.mark.cuda
def test_two_devices():
    image = bytes_of(4, 8, 3, device="cuda")
    for arguments in ((torch.tensor(MEAN), STD), (MEAN, torch.tensor(STD))):
        with pytest.raises(RuntimeError, match="is on another device than image"):
            ops.normalize_image(image, *arguments)


@pytest.mark.cuda
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.gpu_memory(30)
def test_more_elements_than_32_bits_count(memory_format):
    image = torch.zeros(2, 2**15, 10944, 3, device="cuda", dtype=torch.uint8)  # 2^31 + 4194304
    image[0, 0, 0] = image[-1, -1, -1] = 255
    y = ops.normalize_image(image, [0.5] * 3, [0.25] * 3, dtype=torch.float16, memory_format=memory_format)
    assert (y[0, :, 0, 0] == 2).all() and (y[-1, :, -1, -1] == 2).all()
    assert (y == 2).sum() == 6 and (y == -2).sum() == y.numel() - 6
