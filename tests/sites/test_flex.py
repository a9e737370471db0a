"""`flex_attention`: seen although torch's function mode does not see it, its score and mask functions read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from intently.sites import find

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*without torch.compile.*:UserWarning"),
]


class Flex(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options, self.qkv = options, nn.Linear(7, 48)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return flex_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


def only(**options):
    (site,) = find(Flex(**options).eval(), torch.randn(2, 5, 7))
    return site


def test_plain():
    site = only()
    assert (site.path, site.role, site.kind, site.kernel, site.mask) == ("(root)", "self", "flex", "flex", "full")
    assert (site.heads, site.kv_heads, site.head_dim, site.value_dim, site.queries, site.keys) == (4, 4, 4, 4, 5, 5)
    assert site.scale.value == 0.5 and site.source.file == __file__


def test_scale():
    assert only(scale=0.3).scale.value == 0.3


def test_block_mask():
    block = create_block_mask(lambda b, h, q, k: q >= k, None, None, 5, 5, device="cpu")
    assert only(block_mask=block).mask == "causal"


def test_score_function_that_hides():
    def window(score, b, h, q, k):
        return torch.where((q >= k) & (q - k < 2), score, float("-inf"))

    site = only(score_mod=window)
    far = torch.arange(5)[:, None] - torch.arange(5)
    assert torch.equal(site.visible[0, 0], (far >= 0) & (far < 2))
    assert site.mask == "causal & window(2)"


def test_score_function_that_adds_hides_nothing():
    assert only(score_mod=lambda score, b, h, q, k: score - 0.3 * (q - k).abs()).mask == "full"
