"""Where a call is told to be: the innermost module, and a line of the user's rather than of a library's."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

import intently
from intently import Intent, Mask, Target
from intently.mechanism import Attend, Decoder, TransformerBlock, attention
from intently.mechanism.positions import Rotary
from intently.sites import find


class Built(nn.Module):
    """A decoder built from this package's layers; one of its blocks may have lost its scale."""

    def __init__(self, *scales: float | None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(29, 32), nn.Linear(32, 29)
        blocks = [
            TransformerBlock.gated(32, 4, 48, kv_heads=2, position=Rotary(8), attend=Attend(scale=scale))
            for scale in scales
        ]
        self.decoder = Decoder(blocks, norm=nn.RMSNorm(32))

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        keep = None if attention_mask is None else attention_mask.bool()
        return self.head(self.decoder(self.embed(ids), keep=keep))


class Calling(nn.Module):
    """Someone's own module that calls the mechanism's function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return attention(query, key, value, mask=Mask.causal()).transpose(1, 2).flatten(2)


def test_modules_of_the_mechanism_have_their_own_paths():
    sites = find(Built(None, None).eval(), torch.randint(29, (2, 5)))
    assert [site.path for site in sites] == [f"decoder.blocks.{n}.attention.attend" for n in range(2)]
    assert all(site.source is not None and "attend.py" in site.source.file for site in sites)


def test_the_line_of_a_caller_is_the_callers():
    (site,) = find(nn.ModuleDict({"inner": Calling()})["inner"], torch.randn(2, 5, 16))
    lines, first = inspect.getsourcelines(Calling.forward)
    assert site.source is not None and site.source.file == __file__
    assert "attention(query" in lines[site.source.line - first]


def test_a_model_of_these_layers_is_kept_and_a_fault_in_one_is_placed():
    torch.manual_seed(0)
    kept = intently.check(Target(Built(None, None).eval(), Intent(Mask.causal()), tokens=29))
    assert kept.verdict == "kept" and not kept.findings
    broken = intently.check(Target(Built(None, 1.0).eval(), Intent(Mask.causal()), tokens=29))
    errors = {(f.fault, f.site, f.proof) for f in broken.findings if f.severity == "error"}
    assert errors == {("scale-missing", "decoder.blocks.1.attention.attend", "proven")}


def functional(factor: float):
    """A decoder without modules: weights in a dictionary, a norm by hand before the projections."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(24, 24, generator=generator).double() / 5 for name in "qkvo"}
    table = torch.randn(31, 24, generator=generator).double()

    def decoder(ids: Tensor) -> Tensor:
        x = table[ids]
        y = x / x.pow(2).mean(-1, keepdim=True).sqrt()
        q, k, v = (torch.stack(torch.tensor_split(y @ weights[name], 3, -1), 1) for name in "qkv")
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * factor
        later = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        shares = scores.masked_fill(later, float("-inf")).softmax(-1)
        return x + torch.einsum("bhij,bhjd->bhid", shares, v).transpose(1, 2).flatten(2) @ weights["o"]

    return Target(decoder, Intent(Mask.causal()), tokens=31)


def test_weights_in_a_closure_are_weights():
    assert intently.check(functional(8**-0.5)).verdict == "kept"
    errors = [(f.fault, f.proof) for f in intently.check(functional(1.0)).findings if f.severity == "error"]
    assert errors == [("scale-missing", "proven")]
