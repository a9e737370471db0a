"""Fault `mask-misrouted`: the key mask arrives, and is that of another sample, of the queries, or of the position beside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from intently.edits import see
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look

_SHIFTS = (1, -1, 2, -2)


@dataclass(frozen=True)
class Route:
    """Where the mask that a call uses comes from, in words, and the pairs `[batch, heads, query, key]` that are wrong for it."""

    said: str
    pairs: Tensor


def route(look: Look) -> Route | None:
    """What the call's mask is instead of the key mask that was meant; None where it is that mask, or something else altogether."""
    if look.structure is None or look.site.visible is None or look.wanted is None or bool(look.real_keys.all()):
        return None
    wrong = (look.site.visible ^ look.wanted) & look.rows
    astray = wrong.any(-1).any(-1)  # [batch, heads]
    if not astray.any():
        return None
    for said in (_other_samples(look, astray), _rows(look, astray), _shifted(look, astray)):
        if said:
            return Route(said, wrong)
    return None


def misrouted(look: Look) -> bool:
    """Whether the mask found is the one that was meant, taken the wrong way."""
    return route(look) is not None


def _agrees(look: Look, kept: Tensor) -> Tensor:
    """bool `[batch, heads]`: the real rows see exactly what key masks, bool `[batch, key]`, would show them."""
    assert look.structure is not None and look.site.visible is not None
    differ = (look.site.visible ^ (look.structure & kept[:, None, None, :])) & look.rows
    return ~differ.any(-1).any(-1)


def _other_samples(look: Look, astray: Tensor) -> str:
    kept = look.real_keys[:, 0, 0]
    theirs = torch.stack(
        [_agrees(look, kept[c].expand_as(kept)) for c in range(len(kept))], -1
    )  # [batch, heads, other]
    hiding = (theirs & ~kept.all(-1)).any(-1) & astray  # a mask that hides nothing may be any sample's, or none at all
    if not bool(theirs.any(-1)[astray].all()) or not hiding.any():
        return ""
    sample, head = (int(i) for i in hiding.nonzero()[0])
    other = int((theirs[sample, head] & ~kept.all(-1)).nonzero()[0])
    return f"sample {sample}, head {head} uses the key mask of sample {other}"


def _rows(look: Look, astray: Tensor) -> str:
    """Rows hidden in place of keys: a pad's query sees nothing, and real ones see every pad."""
    assert look.structure is not None and look.site.visible is not None
    if look.site.queries != look.site.keys:
        return ""
    blank = ~look.site.visible.any(-1)  # [batch, heads, query]
    logits = look.site.tensors.logits if look.site.tensors is not None else None
    if logits is not None:
        blank = blank | (logits == logits[..., :1]).all(-1)  # a fill too small to be taken for one
    pads = ~look.real_keys[:, 0, 0]
    emptied = (blank | ~pads[:, None]).all(-1)
    differ = (look.site.visible ^ look.structure) & ~pads[:, None, :, None]
    everything = ~differ.any(-1).any(-1)
    return "it hides the rows of pads, not their keys" if bool((emptied & everything)[astray].all()) else ""


def _shifted(look: Look, astray: Tensor) -> str:
    kept = look.real_keys[:, 0, 0]
    for by in _SHIFTS:
        rolled = kept.roll(by, -1)
        edge = slice(0, by) if by > 0 else slice(by, None)
        for filled in (rolled, _with(rolled, edge, True), _with(rolled, edge, False)):
            hides = bool((~filled[astray.any(-1)]).any())
            if hides and bool(_agrees(look, filled).all()):
                where = "late" if by > 0 else "early"
                return f"it is shifted: pads are hidden {abs(by)} position{'s' if abs(by) > 1 else ''} too {where}"
    return ""


def _with(kept: Tensor, edge: slice, value: bool) -> Tensor:
    changed = kept.clone()
    changed[:, edge] = value
    return changed


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks():
        if not each.comparable or not each.condition.layout.padded:
            continue
        broken = [p for p in FAULT.promises if seen.breaks(p, each.condition)]
        found = route(each) if broken else None
        if found is None:
            continue
        shown = "which it is meant not to see" if bool((found.pairs & each.extra).any()) else "which it is meant to see"
        pairs = found.pairs & each.extra if bool((found.pairs & each.extra).any()) else found.pairs
        yield Suspicion(
            fault=FAULT,
            promise=broken[0],
            site=each.site,
            heads=each.heads_where(found.pairs),
            message=f"the key mask goes the wrong way: {found.said}; the mask really used is: {each.site.mask}",
            witness=each.witness(pairs, "query {query} gives weight {weight} to key {key}, " + shown),
            repair=lambda site, batch: see(lambda s: seen.wanted(s, batch))(site),
            condition=each.condition.name,
        )


FAULT = Fault(
    name="mask-misrouted",
    stage="mask",
    promises=("padding-inert", "sees-all", "memory-respected", "causal", "finite"),
    severity="error",
    summary="The key mask is broadcast or reshaped along the wrong axis: another sample's, the rows' instead of the keys', or shifted.",
    symptom="Samples are masked by the lengths of their neighbours; results depend on the order within the batch.",
    why_silent="Shapes fit, and with one length, one sample or one head every order is the same. Some masks fit only where the "
    "batch happens to have as many samples as there are heads.",
    fix="Give the key mask the axes [batch, 1, 1, key]; for a mask per sample and head (nn.MultiheadAttention) repeat each sample "
    "heads times in a row, mask.repeat_interleave(heads, 0), not mask.repeat(heads, 1, 1).",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, attention_mask=None):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        scores = q @ k.mT / 4
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, :, None] == 0, -1e9)
        return (scores.softmax(-1) @ v)[:, 0]

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.full()), features=16)
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, attention_mask=None):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        scores = q @ k.mT / 4
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, None, :] == 0, -1e9)
        return (scores.softmax(-1) @ v)[:, 0]

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.full()), features=16)
""",
    sources=("PyTorch documentation of nn.MultiheadAttention.forward: attn_mask of shape (batch · heads, query, key)",),
    look=look,
)
