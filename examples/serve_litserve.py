"""A service: LitServe takes images by HTTP, puts those that wait into one batch, and answers each with its scores.

    pip install litserve
    python examples/serve_litserve.py [--small] [--device cuda] [--port 8000] [--original]

You learn that batches of any size run one program, and why they are filled up to one of a few sizes all the same: on
CUDA a forward is recorded for each size that comes, so few sizes make few recordings, all of them made before the first
request. scripts/bench_serving.py asks this service, converted and as it was (--original), from many clients at a time.

A request is {"image": 3 x SIZE x SIZE bytes, in base64}, its answer {"scores": [...]}.
"""

import base64

import small_models
import torch
from shared import converted, options_of
from torch.nn import functional as F

try:
    import litserve
except ImportError:
    raise SystemExit("the service is LitServe's: pip install litserve") from None

BUCKETS = (1, 2, 4, 8, 16, 32)
SECONDS_TO_FILL = 0.005  # that the first request of a batch waits for others


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
    """Bytes as the model takes them: floats around 0."""
    return pixels.float() / 64 - 2


def bucket(count):
    """The size to which a batch of ``count`` is filled up."""
    return next(size for size in BUCKETS if size >= count)


def filled_up(inputs):
    """(batch of the next size of BUCKETS, how many of its rows are asked for)"""
    batch = torch.stack(inputs)
    return F.pad(batch, (0, 0) * (batch.dim() - 1) + (0, bucket(len(batch)) - len(batch))), len(batch)


class Service(litserve.LitAPI):
    """What LitServe does with requests, in a process of its own."""

    def __init__(self, small, original):
        super().__init__(max_batch_size=BUCKETS[-1], batch_timeout=SECONDS_TO_FILL)
        self.small, self.original = small, original

    def setup(self, device):
        self.place = device
        model, self.size = classifier(self.small)
        self.model = model.to(device)
        if not self.original:
            example = as_input(images(BUCKETS[-1], self.size)).to(device)
            self.model = converted(type(model).__name__, self.model, example, self.small)
        for size in BUCKETS:
            for _ in range(2):  # at its second time a size is recorded
                self.predict(filled_up([*as_input(images(size, self.size))]))

    def decode_request(self, request):
        pixels = torch.frombuffer(bytearray(base64.b64decode(request["image"])), dtype=torch.uint8)
        return as_input(pixels.view(3, self.size, self.size))

    def batch(self, inputs):
        return filled_up(inputs)

    @torch.no_grad()
    def predict(self, filled):
        batch, count = filled
        return self.model(batch.to(self.place))[:count].cpu()

    def encode_response(self, scores):
        return {"scores": scores.tolist()}


def main(argv=None):
    parser = options_of(__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--original", action="store_true", help="serve the model as it was")
    options = parser.parse_args(argv)
    kind = torch.device(options.device).type
    server = litserve.LitServer(Service(options.small, options.original), accelerator=kind, devices=1)
    server.run(host="127.0.0.1", port=options.port, log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    raise SystemExit(main())
