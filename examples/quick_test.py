"""Does it work here? One small network is converted, checked and timed.

    python examples/quick_test.py [--small] [--device cuda]

You learn the one call that converts a model, what its statistics say, and that the result is the same model: its class,
its state dict, and its outputs but for rounding.
"""

import torch
from shared import converted, options_of
from torch import nn

import kfconvert


class Net(nn.Module):
    """A small convolutional network. (batch, 3, 32, 32) -> (batch, 10)"""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.hidden, self.head = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(nn.functional.gelu(self.hidden(x)))


def main(argv=None):
    options = options_of(__doc__).parse_args(argv)
    torch.manual_seed(0)
    model = Net().eval().to(options.device)
    images = torch.randn(8, 3, 32, 32, device=options.device)
    fused = converted("Net", model, images, options.small)

    assert isinstance(fused, Net) and fused.state_dict().keys() == model.state_dict().keys()
    accurate, speedup = kfconvert.validate_optimization(model, fused, images)
    print(f"validate_optimization: accurate {accurate}, {speedup:.2f} x as fast as the original")
    return 0 if accurate else 1


if __name__ == "__main__":
    raise SystemExit(main())
