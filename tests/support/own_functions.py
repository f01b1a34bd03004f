"""Functions that tests register as patterns: references, and what takes their places."""

import torch
import torch.nn.functional as F


def swish(x):
    return x * torch.sigmoid(1.7 * x)


def swish_replacement(x):
    return F.silu(1.7 * x) / 1.7


def softcap(x, cap):
    return cap * torch.tanh(x / cap)


def softcap_replacement(x, cap):
    return torch.tanh(x / cap).mul_(cap)


def residual_norm(x, residual, weight, eps):
    total = x + residual
    return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight, total


def rotated(q, k, cos, sin):
    """Two results that share the last two arguments."""
    return q * cos + torch.roll(q, 1, -1) * sin, k * cos + torch.roll(k, 1, -1) * sin


def wide(match):
    """A ``when``."""
    return match["x"].shape[-1] >= 16


class Swish(torch.nn.Module):
    def forward(self, x):
        return swish_replacement(x)


swish_module = Swish()
