"""Fault `bias-ignored`: a cap, sink, slope or table of bias is held by the model and has no part in the logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from intently.edits import apply_all, as_in, biased
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look
from intently.faults.paths import changed, lost
from intently.promises.knobs import Knob, applied
from intently.promises.knobs_live import Lack, dead, lacking
from intently.report import Severity, Witness
from intently.sites import Site

_WORDS = {
    "softcap": "a cap of the logits",
    "sink": "a sink",
    "bias": "a bias of the logits",
    "scale": "a factor of the logits",
    "norm": "a norm of queries or keys",
    "parameter": "a parameter",
}


def look(seen: Examination) -> Iterator[Suspicion]:
    for condition in seen.broken("knobs-live"):
        quiet, lacks = dead(seen.trial, condition), lacking(seen.trial, condition)
        for each in seen.looks([condition]):
            held = [k for k in quiet if k.concerns(each.site)]
            if held:
                yield _stored(seen, each, held)
            yield from (_missing(each, lack) for lack in lacks if lack.site.key_name == each.site.key_name)
    yield from _lost_on_a_path(seen)


def _stored(seen: Examination, each: Look, held: Sequence[Knob]) -> Suspicion:
    site = each.site
    repairs = [r for k in held if (r := applied(k, site)) is not None]
    first = held[0]
    names = ", ".join(k.name for k in held[:3]) + (f" and {len(held) - 3} more" if len(held) > 3 else "")
    count = f"{len(held)} settings of attention" if len(held) > 1 else _WORDS[first.kind]
    severity: Severity | None = "note" if seen.trial.target.known else None if any(k.named for k in held) else "warning"
    return Suspicion(
        fault=FAULT,
        promise="knobs-live",
        site=site,
        message=f"{names}: {count}, stored and not applied; set otherwise, no output moves",
        witness=Witness(f"turning {first.name} moves no output", None, {"knob": first.name, "moved": 0.0}),
        repair=(lambda site, batch: apply_all(repairs)(site)) if repairs else None,
        severity=severity,
        condition=each.condition.name,
        unprovable="" if repairs else f"nothing in the shape of {first.name} tells how it is meant to enter the logits",
    )


def _missing(each: Look, lack: Lack) -> Suspicion:
    return Suspicion(
        fault=FAULT,
        promise="knobs-live",
        site=each.site,
        message=f"this call has no {lack.trait}, and {lack.peers} of its kind have one "
        f"({lack.peer.path}: {f'up to {lack.size:.3g}' if lack.trait != 'sink' else 'its softmax sees one more logit'})",
        witness=Witness(
            f"what {lack.peer.path} adds to the logits reaches {lack.size:.3g}; here it is 0", None, {"peer": lack.size}
        ),
        repair=lambda site, batch: _of_peer(lack)(site),
        severity=None if lack.alone else "warning",
        condition=each.condition.name,
    )


def _of_peer(lack: Lack) -> Any:
    """What the peer adds to its own logits, added here."""
    if lack.trait != "bias":
        return as_in(lack.peer)
    tensors = lack.peer.tensors
    assert tensors is not None and tensors.scores is not None and tensors.logits is not None
    added = torch.nan_to_num(tensors.fit.added, neginf=0.0)
    added = torch.where(lack.peer.visible, added, 0.0) if lack.peer.visible is not None else added

    def fitting(site: Site) -> torch.Tensor | None:
        shape = (site.heads, site.queries, site.keys)
        return added[:1] if added.shape[1:] == shape else None

    return biased(fitting)


def _lost_on_a_path(seen: Examination) -> Iterator[Suspicion]:
    """What one backend adds to the logits, and another does not."""
    for condition in seen.broken("backends-agree"):
        if not condition.switch.backend:
            continue
        for site, other in changed(seen, condition):
            what, here = lost(site, other)
            if not what:
                continue
            without, with_it = (
                (condition.switch.name, "the other path") if here else ("the model as it is", condition.switch.name)
            )
            yield Suspicion(
                fault=FAULT,
                promise="backends-agree",
                site=site,
                message=f"{without} leaves out {what}, which {with_it} applies",
                witness=seen.gap(condition),
                repair=lambda s, batch, o=other: as_in(o)(s),
                condition=condition.name,
                undoes=True,
            )


FAULT = Fault(
    name="bias-ignored",
    stage="score",
    promises=("knobs-live", "backends-agree"),
    severity="error",
    summary="A cap, sink, slope or table of bias is held by the model, and the logits are made without it.",
    symptom="Turning the setting changes nothing, or only in one backend or one layer; a ported model is a little worse than the original.",
    why_silent="The tensor is in the state dict and loads without complaint; outputs look right, since the rest of the logits is.",
    fix="Use it where the logits are made, in every layer and on every path: add the bias to the scores or pass it as attn_mask, "
    "cap before the mask, give the sink a column of the softmax; where a fused kernel cannot, refuse it.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.rel_pos_bias = nn.Parameter(torch.randn(99))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        step = torch.arange(x.shape[1])
        bias = self.rel_pos_bias[step - step[:, None] + 49]
        scores = q @ k.mT / 4
        return scores.softmax(-1) @ v

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.full()))
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.rel_pos_bias = nn.Parameter(torch.randn(99))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        step = torch.arange(x.shape[1])
        bias = self.rel_pos_bias[step - step[:, None] + 49]
        scores = q @ k.mT / 4 + bias
        return scores.softmax(-1) @ v

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.full()))
""",
    sources=(
        "PyTorch documentation of F.scaled_dot_product_attention: it takes no cap and no sink",
        "Press et al. 2022, ALiBi: arXiv:2108.12409",
    ),
    look=look,
)
