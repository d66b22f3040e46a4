"""Tensors of several dtypes and shapes to publish, and the secret of the inlets."""

import torch

CPU = torch.device("cpu")
SECRET = b"a secret"


def tensors(scale=1.0):
    return {
        "embed": scale * torch.arange(600.0).view(50, 12),
        "half": (scale * torch.arange(30.0)).bfloat16().view(5, 6),
        "scalar": torch.tensor(scale),
        "strided": scale * torch.arange(12.0).view(3, 4).t(),
        "empty": torch.zeros(0, 3),
        "bias": scale * torch.ones(7),
    }
