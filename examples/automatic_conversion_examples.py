"""One model of each family, and one of your own, converted by the same call.

    python examples/automatic_conversion_examples.py [FAMILY ...] [--small] [--device cuda]

You learn which fusions are found in which family, and that nothing has to be written for any of them: kfconvert reads
what a model computes, not what it is called. Weights are trained ones where a hub can be reached, else random, which is
said. The small form makes models with few and narrow layers.
"""

import torch
from shared import by_name, converted, moved, options_of
from small_models import FAMILIES
from torch import nn

NAMES = {
    "ResNet": "resnet50",
    "DenseNet": "densenet121",
    "EfficientNet": "efficientnet_b0",
    "VGG": "vgg16",
    "MobileNet": "mobilenet_v2",
    "ViT": "vit_b_16",
    "DeiT": "facebook/deit-base-patch16-224",
    "Swin": "swin_t",
    "ConvNeXt": "convnext_tiny",
    "BERT": "bert-base-uncased",
    "GPT-2": "gpt2",
    "RoBERTa": "roberta-base",
    "T5": "t5-small",
}
OWN = "one's own"


class OwnModel(nn.Module):
    """A model of nobody's library: convolutions, a gate and a norm. (batch, 3, height, width) -> (batch, 10)"""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32)
        self.gate, self.value = nn.Linear(32, 64), nn.Linear(32, 64)
        self.layer_norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.layer_norm(nn.functional.silu(self.gate(x)) * self.value(x)))


def example(family, small):
    """(model, example inputs) of a family."""
    if family == OWN:
        return OwnModel(), torch.randn(4, 3, 64, 64)
    if small:
        return FAMILIES[family]()
    entry = by_name(NAMES[family])
    return entry.model, entry.example_inputs


def main(argv=None):
    families = [*NAMES, OWN]
    parser = options_of(__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(families)}  [default: all]")
    options = parser.parse_args(argv)
    if set(options.families) - set(families):
        parser.error(f"there are the families {', '.join(families)}")
    for family in options.families or families:
        torch.manual_seed(0)
        model, inputs = example(family, options.small)
        converted(family, model.eval().to(options.device), moved(inputs, options.device), options.small)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
