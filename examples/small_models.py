"""A small model with random weights of each family, for the small forms of the examples.

Each function returns (model, example inputs): the classes are those of torchvision and transformers, with few and
narrow layers in place of the usual ones.
"""

from typing import Any

import torch
from torch import nn

IMAGE = 32
VOCABULARY = 100
LENGTH = 12


def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10), images()


def densenet():
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2), 16, num_classes=10), images()


def efficientnet():
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    stages = [MBConvConfig(1, 3, 1, 16, 8, 1, 1.0, 1.0), MBConvConfig(4, 3, 2, 8, 16, 2, 1.0, 1.0)]
    return EfficientNet(stages, dropout=0.1, num_classes=10), images()


def vgg():
    from torchvision.models.vgg import make_layers

    # The classifier of torchvision's VGG has more than 100 million weights, whatever the features are.
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 10)
    return nn.Sequential(make_layers([16, "M", 32, "M"], batch_norm=True), *head), images()


def mobilenet():
    from torchvision.models import MobileNetV2

    return MobileNetV2(num_classes=10, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2]]), images()


def vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(IMAGE, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10)
    nn.init.normal_(model.heads.head.weight)  # which begins at 0, and all outputs with it
    return model, images()


def deit():
    from transformers import DeiTConfig, DeiTForImageClassification

    config = DeiTConfig(image_size=IMAGE, patch_size=8, num_labels=10, **_layers())
    return DeiTForImageClassification(config), {"pixel_values": images()}


def swin():
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=10), images()


def convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=10), images()


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=VOCABULARY, **_layers())), {"input_ids": tokens()}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, use_cache=False, **_ends())
    return GPT2LMHeadModel(config), {"input_ids": tokens()}


def roberta():
    from transformers import RobertaConfig, RobertaModel

    return RobertaModel(RobertaConfig(vocab_size=VOCABULARY, **_layers(), **_ends())), {"input_ids": tokens()}


def t5():
    from transformers import T5Config, T5Model

    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, use_cache=False)
    return T5Model(config), {"input_ids": tokens(), "decoder_input_ids": tokens()[:, :4]}


def images() -> torch.Tensor:
    return torch.randn(2, 3, IMAGE, IMAGE)


def tokens() -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (2, LENGTH))


def _layers() -> dict[str, Any]:
    return {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def _ends() -> dict[str, int]:
    return {"bos_token_id": 1, "eos_token_id": 2}


FAMILIES = {
    "ResNet": resnet,
    "DenseNet": densenet,
    "EfficientNet": efficientnet,
    "VGG": vgg,
    "MobileNet": mobilenet,
    "ViT": vit,
    "DeiT": deit,
    "Swin": swin,
    "ConvNeXt": convnext,
    "BERT": bert,
    "GPT-2": gpt2,
    "RoBERTa": roberta,
    "T5": t5,
}
