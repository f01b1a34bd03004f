"""A service: LitServe takes images by HTTP, puts those that wait into one batch, and answers each with its scores.

    pip install litserve
    python examples/serve_litserve.py [--small] [--device cuda] [--port 8000] [--original]

You learn that batches of any size run one program, and why they are filled up to one of a few sizes all the same: on
CUDA a forward is recorded for each size that comes, so few sizes make few recordings, all of them made before the first
request. scripts/bench_serving.py asks this service, converted and as it was (--original), from many clients at a time.

A request is {"image": 3 x n x n bytes, in base64}, its answer {"scores": [...], "fallbacks": count}. The count
says how many calls ran the original code so far; it is null for the original model.
"""

import serving
from serving import BUCKETS, SECONDS_TO_FILL
from shared import converted


class Service(serving.litserve().LitAPI):
    """What LitServe does with requests, in a separate process."""

    def __init__(self, small, original):
        super().__init__(max_batch_size=BUCKETS[-1], batch_timeout=SECONDS_TO_FILL)
        self.small, self.original = small, original

    def setup(self, device):
        self.place = device
        model, self.size = serving.classifier(self.small)
        self.model = model.to(device)
        if not self.original:
            example = serving.as_input(serving.images(BUCKETS[-1], self.size)).to(device)
            self.model = converted(type(model).__name__, self.model, example, self.small)
        serving.warm_up(self.model, self.size, device)

    def decode_request(self, request: serving.Image):
        return serving.decoded(request.image, self.size)

    def batch(self, inputs):
        return inputs  # of any number; scores_of pads them

    def predict(self, inputs):
        return serving.scores_of(self.model, inputs, self.place)

    def encode_response(self, scores):
        return {"scores": scores.tolist(), "fallbacks": serving.fallbacks(self.model)}


def main(argv=None):
    options = serving.options_of_service(__doc__).parse_args(argv)
    serving.serve_with_litserve(Service(options.small, options.original), options)


if __name__ == "__main__":
    raise SystemExit(main())
