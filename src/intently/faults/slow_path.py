"""Fault `slow-path`: attention runs without the fused kernel it could have, or pays for pairs that its mask hides."""

from __future__ import annotations

from collections.abc import Iterator

from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises.affordable import Cost, costs
from intently.report import Source, Witness

# Why, and what would win the fast kernel back.
_WORDS = {
    "written out": (
        "scores, softmax and weighted sum are written out, so that {heads} × N×N weights are made and thrown away",
        "F.scaled_dot_product_attention({arguments}) gives the same output",
    ),
    "need_weights": (
        "nn.MultiheadAttention is asked for its weights (need_weights=True is the default), and nobody looks at them",
        "need_weights=False lets the fused kernel run",
    ),
    "value width": (
        "the values are {value_dim} wide and the queries {head_dim}, which the CPU's fused kernel does not take",
        "pad the narrower ones with zeros (and pass scale=) and cut the output",
    ),
    "dropout": (
        "dropout_p > 0, which the CPU's fused kernel does not take",
        "drop outside of the call, or only in training",
    ),
    "mask gradient": (
        "the mask takes gradients",
        "detach it where it is not trained, or use flex_attention with a score_mod",
    ),
    "axes": (
        "the operands do not have four axes, [batch, heads, position, width]",
        "q.unsqueeze(1) for one head (and squeeze the output)",
    ),
    "mask axes": (
        "the mask has three axes",
        "give it two or four: [batch, heads, query, key], with 1 where it is the same",
    ),
    "dtype": ("queries, keys and values differ in dtype", "cast them alike"),
    "broadcast heads": ("fewer heads of keys and values are broadcast", "enable_gqa=True, or expand them"),
    "memory order": ("the last axis of an operand is not contiguous in memory", ".contiguous() before the call"),
    "switched off": (
        "the fused kernels are switched off around this call",
        "leave sdpa_kernel(SDPBackend.MATH) to tests",
    ),
    "triangle": (
        "the mask passed is a plain triangle of N×N",
        "is_causal=True in its place computes half of it, and lets the flash kernel run on a GPU",
    ),
    "sparse": (
        "no row sees more than {most} of {keys} keys, and all are computed: the cost grows with N²",
        "flex_attention with a block mask, or attention over blocks, grows with what the mask allows",
    ),
    "unknown": (
        "torch takes no fused kernel for this call",
        "see its reasons with TORCH_LOGS, or torch.backends.cuda.can_use_flash_attention",
    ),
}
# Reasons for which one fused call with the same output is the proof.
_REPLAYED = _WORDS.keys() - {"sparse", "unknown", "dropout"}


def look(seen: Examination) -> Iterator[Suspicion]:
    """One suspicion a line of code: layers that run the same line cost the same way."""
    for condition in seen.broken("affordable"):
        lines: dict[tuple[Source | None, frozenset[str]], list[Cost]] = {}
        for cost in costs(seen.trial, condition):
            lines.setdefault((cost.site.line("aggregate"), cost.reasons), []).append(cost)
        for (_, reasons), those in lines.items():
            cost = those[0]
            more = f" (and at {len(those) - 1} more)" if len(those) > 1 else ""
            yield Suspicion(
                fault=FAULT,
                promise="affordable",
                site=cost.site,
                message="; ".join(_said(cost, r) for r in sorted(reasons)) + more,
                witness=_witness(cost),
                condition=condition.name,
                proven_by=_proof(cost) if reasons <= _REPLAYED else "",
                unprovable="" if reasons <= _REPLAYED else "what the faster call costs was not tried",
            )


def _said(cost: Cost, reason: str) -> str:
    site = cost.site
    why, cure = _WORDS[reason]
    most = int(site.visible.sum(-1).amax()) if site.visible is not None else 0
    arguments = _arguments(cost)
    facts = {
        "heads": site.heads,
        "head_dim": site.head_dim,
        "value_dim": site.value_dim,
        "keys": site.keys,
        "most": most,
    }
    return f"{why.format(**facts, arguments=arguments)}: {cure.format(**facts, arguments=arguments)}"


def _arguments(cost: Cost) -> str:
    if cost.fast is None:
        return "q, k, v"
    given = cost.fast.arguments
    said = ["q, k, v"]
    if given["is_causal"]:
        said.append("is_causal=True")
    elif given["attn_mask"] is not None:
        said.append("attn_mask=mask" if given["attn_mask"].dtype.is_floating_point is False else "attn_mask=bias")
    if abs(given["scale"] * cost.site.head_dim**0.5 - 1) > 1e-6:
        said.append(f"scale={given['scale']:.4g}")
    return ", ".join(said)


def _witness(cost: Cost) -> Witness:
    site = cost.site
    copies = site.heads if "flash" not in site.kernel else 1
    what = f"{copies} maps a sample" if "flash" not in site.kernel else "the mask"
    return Witness(
        f"{site.kernel}, {site.queries} queries × {site.keys} keys: at 4096 tokens {what} would hold {copies * 16} million entries",
        None,
        {"kernel": site.kernel, "reasons": sorted(cost.reasons)},
    )


def _proof(cost: Cost) -> str:
    if cost.fast is None or not cost.fast.stands_in:
        return ""
    return f"replayed as one call with the {cost.fast.kernel} kernel, the output is the same (relative difference {cost.fast.gap:.1g})"


FAULT = Fault(
    name="slow-path",
    stage="outside",
    promises=("affordable",),
    severity="note",
    summary="Attention runs without the fused kernel it could have, or pays for pairs that its mask hides.",
    symptom="Long inputs cost several times the time, and memory that grows with the square of the length.",
    why_silent="The output is right, and torch falls back without a word.",
    fix="Call F.scaled_dot_product_attention with operands of four axes, one width and one dtype, is_causal in place of a triangle, and no "
    "dropout in eval; pass need_weights=False to nn.MultiheadAttention.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

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
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.full()))
""",
    sources=("PyTorch documentation of F.scaled_dot_product_attention", "Dao et al. 2022: arXiv:2205.14135"),
    look=look,
)
