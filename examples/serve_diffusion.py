"""A service of a diffusion pipeline: LitServe batches the requests that wait, and answers each with its image.

    pip install litserve diffusers
    python examples/serve_diffusion.py [--small] [--device cuda] [--port 8000] [--original]

You learn that one call converts the modules of a pipeline, and that batches of any size then run fused. Each request
has its own generator, so its image does not depend on the other requests of the batch. Weights are random, so the
images show noise.

A request is {"label": 0 to 15, "seed": n}. A table of embeddings takes the place of a text encoder. The answer is
{"image": a PNG file in base64, "fallbacks": count}.
"""

import base64

import pipelines
import pydantic
import serving
import torch
from torch import nn
from torchvision.io import encode_png

import kfconvert

BUCKETS = (1, 2, 4, 8)
SECONDS_TO_FILL = 0.02  # that the first request of a batch waits for others
LABELS = 16


class Request(pydantic.BaseModel):
    """FastAPI rejects other requests before they join a batch."""

    label: int = pydantic.Field(ge=0, lt=LABELS)
    seed: int = pydantic.Field(0, ge=0, lt=2**63)


class Painter:
    """The pipeline, which makes a batch of images; a seed makes its weights, so that all processes have the same."""

    def __init__(self, small, device):
        torch.manual_seed(0)
        self.pipe, call = pipelines.painter(small)
        dtype = torch.float16 if torch.device(device).type == "cuda" else torch.float32
        self.pipe.to(device, dtype)
        table = torch.randn(LABELS, *call["prompt_embeds"].shape[1:])
        self.labels, self.none = (each.to(device, dtype) for each in (table, torch.zeros_like(table[:1])))
        self.call = {**call, "num_inference_steps": 4 if small else 20}
        self.options = {"effort": "fast", "select": "all"} if small else {}

    def arguments(self, requests):
        """The arguments of a call of the pipeline for the requests."""
        embeddings = self.labels[[request.label for request in requests]]
        return {
            **self.call,
            "prompt_embeds": embeddings,
            "negative_prompt_embeds": self.none.expand_as(embeddings),
            "generator": [torch.Generator().manual_seed(request.seed) for request in requests],
        }

    def convert(self):
        """Converts the modules of the pipeline."""
        example = {**self.arguments([Request(label=0)] * BUCKETS[-1]), "num_inference_steps": 2}
        kfconvert.auto_convert_model(self.pipe, example_inputs=example, **self.options)

    def images(self, requests):
        """(len(requests), 3, height, width) values from 0 to 1."""
        padding = requests[:1] * (serving.bucket(len(requests), BUCKETS) - len(requests))
        return self.pipe(**self.arguments(requests + padding)).images[: len(requests)].float().cpu()

    @property
    def modules(self):
        return [each for each in self.pipe.components.values() if isinstance(each, nn.Module)]


class Service(serving.litserve().LitAPI):
    """What LitServe does with requests, in a separate process."""

    def __init__(self, small, original):
        super().__init__(max_batch_size=BUCKETS[-1], batch_timeout=SECONDS_TO_FILL)
        self.small, self.original = small, original

    def setup(self, device):
        self.painter = Painter(self.small, device)
        if not self.original:
            self.painter.convert()
        for size in BUCKETS:
            self.painter.images([Request(label=0)] * size)  # each step after the first replays its recording

    def decode_request(self, request: Request):
        return request

    def predict(self, requests):
        return self.painter.images(requests)

    def encode_response(self, image):
        file = encode_png((255 * image).round().to(torch.uint8))
        said = base64.b64encode(bytes(file)).decode()
        return {"image": said, "fallbacks": serving.fallbacks(*self.painter.modules)}


def main(argv=None):
    options = serving.options_of_service(__doc__).parse_args(argv)
    serving.serve_with_litserve(Service(options.small, options.original), options)


if __name__ == "__main__":
    raise SystemExit(main())
