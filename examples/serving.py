"""Functions that the services share: options, batches, counters of fallbacks, and a classifier of images."""

import importlib
import math

import pydantic
import small_models
import torch
from shared import options_of
from torch.nn import functional as F

BUCKETS = (1, 2, 4, 8, 16, 32)
SECONDS_TO_FILL = 0.005  # that the first image of a batch waits for others


def needed(module, line):
    """The module of an optional package; without the package, exits with the line."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SystemExit(line) from None


def options_of_service(description):
    """A parser of the options that every service has."""
    parser = options_of(description)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--original", action="store_true", help="serve the original model")
    return parser


def litserve():
    return needed("litserve", "the service is LitServe's: pip install litserve")


def serve_with_litserve(service, options):
    """Runs LitServe with one process for the model, until it is interrupted."""
    kind = torch.device(options.device).type
    server = litserve().LitServer(service, accelerator=kind, devices=1)
    server.run(host="127.0.0.1", port=options.port, log_level="warning", generate_client_file=False)


def bucket(count, sizes=BUCKETS):
    """The size to which a batch of ``count`` is padded."""
    return next(size for size in sizes if size >= count)


def fallbacks(*models):
    """The number of calls that ran the original code of converted modules so far; None without such modules."""
    infos = [
        module.kfconvert_info() for model in models for module in model.modules() if "kfconvert_info" in vars(module)
    ]
    if not infos:
        return None
    misses = [counts["misses"] for info in infos for counts in (info["guard"], *info["parts"].values())]
    loops = [info["generate"]["others"] for info in infos if info["generate"]]
    return sum(sum(counts.values()) for counts in misses + loops)


def classifier(small):
    """(model, size of its images); a seed makes its weights, so that all processes have the same."""
    torch.manual_seed(0)
    if small:
        return small_models.resnet()[0].eval(), small_models.IMAGE
    from torchvision.models import resnet18

    return resnet18().eval(), 224


def images(count, size):
    """(count, 3, size, size) bytes of images that differ from one another in large areas."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return (255 * F.interpolate(coarse, size=size)).to(torch.uint8)


def as_input(pixels):
    """Bytes as the classifier takes them: floats around 0."""
    return pixels.float() / 64 - 2


class Image(pydantic.BaseModel):
    """A request. FastAPI rejects others before they join a batch, whose requests would all get the error of one."""

    image: pydantic.Base64Bytes

    @pydantic.field_validator("image")
    @classmethod
    def _is_square(cls, pixels):
        if not pixels or 3 * math.isqrt(len(pixels) // 3) ** 2 != len(pixels):
            raise ValueError("expected 3 x n x n bytes")
        return pixels


def decoded(pixels, size):
    """The input for an image of 3 x n x n bytes, resized to ``size``."""
    side = math.isqrt(len(pixels) // 3)
    image = as_input(torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(3, side, side))
    return image if side == size else F.interpolate(image[None], size=(size, size), mode="bilinear")[0]


def filled_up(inputs):
    """(batch of the next size of BUCKETS, number of its rows that were asked for)"""
    batch = torch.stack(inputs)
    return F.pad(batch, (0, 0) * (batch.dim() - 1) + (0, bucket(len(batch)) - len(batch))), len(batch)


@torch.no_grad()
def scores_of(model, inputs, device):
    """(len(inputs), classes) scores, computed as one padded batch."""
    batch, count = filled_up(inputs)
    return model(batch.to(device))[:count].cpu()


def warm_up(model, size, device):
    """Makes the recordings of all batch sizes: the second call with a size records it."""
    for count in BUCKETS:
        for _ in range(2):
            scores_of(model, [*as_input(images(count, size))], device)
