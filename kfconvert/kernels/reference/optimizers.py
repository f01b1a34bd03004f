"""Optimizers without torch's fused steps."""

import torch


def fused_adam(params, lr=1e-3, **options) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr, foreach=False, fused=False, **options)


def fused_adamw(params, lr=1e-3, **options) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr, foreach=False, fused=False, **options)


def fused_sgd(params, lr=1e-3, **options) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr, foreach=False, fused=False, **options)
