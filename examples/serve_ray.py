"""A service with replicas: Ray Serve classifies images in several processes, each with a GPU, and replaces dead ones.

    pip install "ray[serve]"
    python examples/serve_ray.py [--small] [--device cuda] [--port 8000] [--replicas 2] [--original]

You learn that a model is converted and saved once, and that each replica loads it without tracing or timing. If a
replica dies, Ray Serve starts another. The requests that the dead replica had not answered fail, so the gateway sends
them again. Classification has no side effects, so a repeated request is harmless.

Requests and answers are those of serve_litserve.py. The answer also has "replica", the process that computed it.
"""

import os
import tempfile

import serving
import torch
from serving import BUCKETS, SECONDS_TO_FILL
from shared import converted

import kfconvert

LINE = "the replicas are Ray Serve's: pip install 'ray[serve]'"
ray, serve, fastapi = (serving.needed(name, LINE) for name in ("ray", "ray.serve", "fastapi"))

ATTEMPTS = 5
api = fastapi.FastAPI()


@serve.deployment(max_ongoing_requests=2 * BUCKETS[-1], health_check_period_s=1)
class Classifier:
    """A replica, which loads the artifact in ``path``, or the original model if there is none."""

    def __init__(self, path, small, device):
        self.place = device
        model, self.size = serving.classifier(small)
        self.model = model.to(device) if path is None else kfconvert.load(path, model=model, device=device)
        serving.warm_up(self.model, self.size, device)

    @serve.batch(max_batch_size=BUCKETS[-1], batch_wait_timeout_s=SECONDS_TO_FILL)
    async def __call__(self, images):
        scores = serving.scores_of(self.model, [serving.decoded(image, self.size) for image in images], self.place)
        said = {"fallbacks": serving.fallbacks(self.model), "replica": os.getpid()}
        return [{"scores": each.tolist(), **said} for each in scores]


@serve.deployment(max_ongoing_requests=1000)
@serve.ingress(api)
class Gateway:
    """Passes requests to the replicas, and again if a replica dies before it answers."""

    def __init__(self, replicas):
        self.replicas = replicas

    @api.get("/health")
    async def health(self):
        return "ok"

    @api.post("/predict")
    async def predict(self, request: serving.Image):
        for _ in range(ATTEMPTS - 1):
            try:
                return await self.replicas.remote(request.image)
            except ray.exceptions.RayActorError:
                continue  # Ray Serve no longer selects this replica
        return await self.replicas.remote(request.image)


def main(argv=None):
    parser = serving.options_of_service(__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args(argv)
    on_gpus = torch.device(options.device).type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        if not options.original:
            model, size = serving.classifier(options.small)
            example = serving.as_input(serving.images(BUCKETS[-1], size)).to(options.device)
            kfconvert.save(converted(type(model).__name__, model.to(options.device), example, options.small), folder)
        ray.init(num_cpus=options.replicas, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        replicas = Classifier.options(
            num_replicas=options.replicas,
            ray_actor_options={"num_gpus": 1} if on_gpus else {"num_cpus": 1},
        ).bind(None if options.original else folder, options.small, "cuda" if on_gpus else "cpu")
        serve.run(Gateway.options(ray_actor_options={"num_cpus": 0}).bind(replicas), blocking=True)


if __name__ == "__main__":
    raise SystemExit(main())
