"""Fault `memory-mask-ignored`: cross-attention sees what the source's mask hides."""

from __future__ import annotations

from collections.abc import Iterator

from intently.edits import see
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look, streams_of
from intently.faults.mask_inverted import inverted_keys
from intently.faults.padding_leak import pads_seen


def reads_source(look: Look) -> bool:
    """Whether the call's keys run along a source and its queries do not."""
    target = look.trial.target
    _, key = streams_of(target, look.trial.lengths, look.site)
    return look.site.role == "cross" and key is not None and key in target.sources


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks():
        if not each.comparable or not each.condition.layout.padded or not reads_source(each):
            continue
        broken = seen.breaks("memory-respected", each.condition) or seen.unjudged("memory-respected", each.condition)
        pairs = pads_seen(each)
        if not broken or not pairs.any() or inverted_keys(each):
            continue
        argument = ", ".join(sorted(each.key_mask_arguments)) or "the source's mask"
        arrives = "reaches this call and hides nothing" if each.mask_arrives else "never reaches this call"
        yield Suspicion(
            fault=FAULT,
            promise="memory-respected",
            site=each.site,
            heads=each.heads_where(pairs),
            message=f"masked source positions (keys {each.pads()} of sample 0) are seen; {argument} {arrives}, which uses the mask: "
            f"{each.site.mask}",
            witness=each.witness(
                pairs, "query {query} gives weight {weight} to key {key}, which the source's mask hides"
            ),
            repair=lambda site, batch: see(lambda s: seen.wanted(s, batch), clean=True)(site),
            condition=each.condition.name,
        )


FAULT = Fault(
    name="memory-mask-ignored",
    stage="mask",
    promises=("memory-respected", "padding-inert"),
    severity="error",
    summary="Cross-attention sees source positions that the source's mask hides.",
    symptom="A translation or a caption depends on how long the other sources of the batch are; empty context is read as content.",
    why_silent="The encoder uses the mask, so the argument seems to work; with one source, or equal lengths, all is well.",
    fix="Pass the source's mask to the cross-attention of every layer too, in every code path (each backend, with and without a "
    "cache), and hide those keys before the softmax.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.MultiheadAttention(16, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, memory, memory_key_padding_mask=None):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.own(x, x, x, attn_mask=later)[0]
        return x + self.cross(x, memory, memory)[0]

def build():
    torch.manual_seed(0)
    return Target(Reader().eval(), Intent(Mask.causal()), features=16)
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.MultiheadAttention(16, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, memory, memory_key_padding_mask=None):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.own(x, x, x, attn_mask=later)[0]
        return x + self.cross(x, memory, memory, key_padding_mask=memory_key_padding_mask)[0]

def build():
    torch.manual_seed(0)
    return Target(Reader().eval(), Intent(Mask.causal()), features=16)
""",
    sources=("huggingface/transformers#47946",),
    look=look,
)
