"""Fault `cache-misaligned`: a call with cached keys sees other keys than the same queries in the whole forward."""

from __future__ import annotations

from collections.abc import Iterator

from intently.faults.base import Fault, Suspicion
from intently.faults.cached import overfull, steps
from intently.faults.evidence import Examination
from intently.report import Witness


def look(seen: Examination) -> Iterator[Suspicion]:
    for step in steps(seen):
        others = step.extra & ~step.later & ~step.pads
        if step.missing.any() or others.any():
            yield step.suspicion(FAULT, step.wrong)
    for each, whole in overfull(seen):
        read = f"{each.site.keys} keys are read, where the whole forward has {whole.keys} of the source"
        yield Suspicion(
            fault=FAULT,
            promise="cache-equal",
            site=each.site,
            message=f"with {each.batch.first} tokens fed before, {read}: those of other calls, or of earlier pieces, stand in its cache",
            witness=Witness(read, None, {"keys": each.site.keys, "in the whole forward": whole.keys}),
            condition=each.condition.name,
            unprovable="which of the cached keys are its own cannot be told",
        )


FAULT = Fault(
    name="cache-misaligned",
    stage="mask",
    promises=("cache-equal",),
    severity="error",
    summary="With cached keys the mask is laid against the wrong keys: a step misses keys that the whole forward sees.",
    symptom="Generation with the cache drifts or repeats itself; without the cache, and in training, all is well.",
    why_silent="A triangle of the new queries over all keys has the right shape. Training never runs this path, and a step sees at "
    "least the first key, so that text comes out.",
    fix="Align the mask at its end: query i of n new ones, with m cached keys, sees keys up to m + i. is_causal=True aligns at the "
    "start, so use it only where nothing is cached; one query needs no triangle. Give self- and cross-attention a cache each.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(17, 16), nn.Linear(16, 48)

    def forward(self, tokens, cache=None):
        q, k, v = self.qkv(self.embed(tokens))[:, None].chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y[:, 0], (k, v)

def build():
    torch.manual_seed(0)
    return Target(Decoder(), Intent(Mask.causal()), tokens=17)
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(17, 16), nn.Linear(16, 48)

    def forward(self, tokens, cache=None):
        q, k, v = self.qkv(self.embed(tokens))[:, None].chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return y[:, 0], (k, v)

def build():
    torch.manual_seed(0)
    return Target(Decoder(), Intent(Mask.causal()), tokens=17)
""",
    sources=(
        "pytorch/pytorch#108108, is_causal with fewer queries than keys",
        "lucidrains/x-transformers#187, cached generation with flash attention",
    ),
    look=look,
)
