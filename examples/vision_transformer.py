"""A vision transformer, trained on scikit-learn's handwritten digits, then converted.

    pip install scikit-learn
    python examples/vision_transformer.py [--small] [--device cuda]

You learn that what counts for a user, here the share of images of a held-out part that are named rightly, is measured
on both models, and that a converted model takes any number of images.
"""

import torch
from shared import converted, options_of
from torch import nn
from torch.nn import functional as F

import kfconvert

SIZE, PATCH, CLASSES = 8, 2, 10


class VisionTransformer(nn.Module):
    """Patches as tokens, layers of an encoder, and a head on their mean. (batch, 1, 8, 8) -> (batch, 10)"""

    def __init__(self, width, heads, layers):
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def digits():
    """1797 images of 8 x 8 from 0 to 1, and which digit each of them is."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the digits are those of scikit-learn: pip install scikit-learn") from None
    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)


def train(model, images, targets, steps):
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,), device=images.device)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), targets[chosen]).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def share_right(model, images, targets):
    return (model(images).argmax(-1) == targets).double().mean().item()


def main(argv=None):
    options = options_of(__doc__).parse_args(argv)
    torch.manual_seed(0)
    images, targets = (tensor.to(options.device) for tensor in digits())
    (seen, held_out), (seen_targets, held_out_targets) = (t.split([1500, len(t) - 1500]) for t in (images, targets))
    sizes = {"width": 32, "heads": 2, "layers": 2} if options.small else {"width": 96, "heads": 4, "layers": 4}
    model = VisionTransformer(**sizes).to(options.device)
    train(model, seen, seen_targets, 100 if options.small else 300)

    fused = converted("VisionTransformer", model, held_out[:8], options.small)
    shares = [share_right(which, held_out, held_out_targets) for which in (model, fused)]
    print(f"right of {len(held_out)} images that were not seen: {shares[0]:.1%}, converted {shares[1]:.1%}")
    accurate, speedup = kfconvert.validate_optimization(model, fused, held_out)
    print(f"accurate {accurate}, {speedup:.2f} x as fast as the original on all of them")
    return 0 if accurate and shares[0] > 2 / CLASSES else 1


if __name__ == "__main__":
    raise SystemExit(main())
