"""Dinat hands natten [batch, width, height, heads, head] where [batch, heads, height, width, head] is read.

Call: every forward, wherever natten is installed; with as many columns as heads the output is silently wrong, else the
reshape behind it raises. Where: models/dinat/modeling_dinat.py, NeighborhoodAttention.forward: `.view(hidden_shape)
.transpose(1, 2)`, written for [batch, tokens, heads, head]. A stand-in for natten is used, on 3×3 patches, where a
neighborhood of 3×3 is the whole picture.
"""

import sys

import torch
from transformers import DinatConfig
from transformers.models.dinat import modeling_dinat as dinat


def scores(query, key, bias, kernel_size, dilation):  # natten2dqkrpb, of a picture as large as the kernel, no bias
    return torch.einsum("bhijd,bhkld->bhijkl", query, key).flatten(-2)


def mixed(weights, value, kernel_size, dilation):  # natten2dav
    return torch.einsum("bhijn,bhnd->bhijd", weights, value.flatten(2, 3))


dinat.natten2dqkrpb, dinat.natten2dav = scores, mixed
torch.manual_seed(0)
shows = False
for heads in (3, 2):
    attention = dinat.NeighborhoodAttention(DinatConfig(), 4 * heads, heads, kernel_size=3, dilation=1).eval()
    x = torch.randn(1, 3, 3, 4 * heads)
    q, k, v = (f(x).reshape(1, 9, heads, 4).transpose(1, 2) for f in (attention.query, attention.key, attention.value))
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, 3, 3, -1)
    try:
        gap = float((attention(x)[0] - right).abs().max())
        print(f"{heads} heads, 3 columns: off by {gap:.3g} (of {float(right.abs().max()):.3g})")
        shows |= gap > 1e-5
    except RuntimeError as error:
        print(f"{heads} heads, 3 columns: {str(error).splitlines()[0]}")
        shows = True
sys.exit(shows)
