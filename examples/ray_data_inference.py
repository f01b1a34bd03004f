"""Offline inference: the digits of a data set are named by two workers of Ray Data.

    pip install "ray[data]" scikit-learn
    python examples/ray_data_inference.py [--small] [--device cuda]

You learn that a model is converted and saved once, that each worker loads it once and not for each batch, on CUDA onto
a GPU of its own, that batches of any size run its program, the last one too, and that no row is lost: each is compared
with what the original says of it.
"""

import tempfile

import torch
from shared import converted, options_of
from vision_transformer import VisionTransformer, digits, train

import kfconvert

WORKERS, BATCH = 2, 100


class Namer:
    """What a worker keeps: the converted model. It adds to each row which digit its image is."""

    def __init__(self, path, sizes, device):
        torch.set_num_threads(1)  # the workers share the CPU
        self.model = kfconvert.load(path, model=VisionTransformer(**sizes)).to(device)

    @torch.no_grad()
    def __call__(self, rows):
        device = next(self.model.parameters()).device
        rows["named"] = self.model(torch.as_tensor(rows["image"], device=device)).argmax(-1).cpu().numpy()
        guard = self.model.kfconvert_info()["guard"]
        rows["by_program"] = [not guard["misses"]] * len(rows["named"])
        return rows


def main(argv=None):
    options = options_of(__doc__).parse_args(argv)
    try:
        import ray
        import ray.data
    except ImportError:
        raise SystemExit("the workers are those of Ray Data: pip install 'ray[data]'") from None
    torch.manual_seed(0)
    images, targets = digits()
    if options.small:
        images, targets = images[:450], targets[:450]
    sizes = {"width": 32, "heads": 2, "layers": 2} if options.small else {"width": 96, "heads": 4, "layers": 4}
    model = VisionTransformer(**sizes).to(options.device)
    train(model, images.to(options.device), targets.to(options.device), 100)
    with torch.no_grad():
        expected = model(images.to(options.device)).argmax(-1).cpu()

    on_gpus = torch.device(options.device).type == "cuda"
    with tempfile.TemporaryDirectory() as path:
        fused = converted("VisionTransformer", model, images[:BATCH].to(options.device), options.small)
        kfconvert.save(fused, path)
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            ray.data.DataContext.get_current().enable_progress_bars = False
            rows = ray.data.from_items(
                [{"number": number, "image": image.numpy()} for number, image in enumerate(images)]
            ).map_batches(
                Namer,
                fn_constructor_kwargs={"path": path, "sizes": sizes, "device": "cuda" if on_gpus else "cpu"},
                batch_size=BATCH,
                num_gpus=1 if on_gpus else 0,
                compute=ray.data.ActorPoolStrategy(
                    size=min(WORKERS, torch.cuda.device_count()) if on_gpus else WORKERS
                ),
            )
            found = {row["number"]: row for row in rows.take_all()}
        finally:
            ray.shutdown()

    named = torch.tensor([found[number]["named"] for number in range(len(images)) if number in found])
    lost = len(images) - len(named)
    print(f"{len(images)} images, {lost} lost, run by the program: {all(row['by_program'] for row in found.values())}")
    if lost:
        return 1
    shares = [(names == targets).double().mean().item() for names in (expected, named)]
    print(f"right: {shares[0]:.1%}, converted {shares[1]:.1%}; named as by the original: {(named == expected).sum()}")
    return 0 if (named == expected).double().mean() > 0.99 else 1


if __name__ == "__main__":
    raise SystemExit(main())
