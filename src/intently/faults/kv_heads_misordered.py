"""Fault `kv-heads-misordered`: query heads read the keys or values of another group, or are added up before they read."""

from __future__ import annotations

from collections.abc import Iterator

from intently.edits import regroup
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises.grouped import misread
from intently.report import Table, Witness
from intently.sites import Site


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks():
        reads = each.site.reads
        if reads is None or not seen.breaks("grouped", each.condition):
            continue
        if reads.summed > 1:
            yield Suspicion(
                fault=FAULT,
                promise="grouped",
                site=each.site,
                message=f"{reads.summed} heads are added up into one where each should attend for itself: "
                f"the heads of a group have one set of weights and one output, and the layer has {reads.summed} times fewer of them",
                witness=Witness(
                    f"a sum over {reads.summed} heads runs inside the call", None, {"summed": reads.summed}
                ),
                condition=each.condition.name,
                unprovable="the layer's output has no place for the heads that were added up",
            )
            continue
        wrong = misread(seen.trial, each.site)
        if not wrong:
            continue
        heads = tuple(sorted({h for hs in wrong.values() for h in hs}))
        yield Suspicion(
            fault=FAULT,
            promise="grouped",
            site=each.site,
            heads=heads,
            message=_message(each.site, wrong),
            witness=_witness(each.site, heads[0]),
            repair=lambda site, batch: regroup()(site),
            condition=each.condition.name,
        )


def _message(site: Site, wrong: dict[str, tuple[int, ...]]) -> str:
    reads = site.reads
    assert reads is not None
    names = " and ".join(wrong)
    own = reads.keys if "keys" in wrong else reads.values
    count = len(set(own))
    tiled = all(kv == q % count for q, kv in zip(reads.queries, own, strict=True))
    order = f"head h reads head h mod {count}" if tiled else f"heads 0, 1, … read heads {', '.join(map(str, own))}"
    other = "" if len(wrong) == 2 else f", while the {'values' if 'keys' in wrong else 'keys'} are in order"
    return f"{names} are repeated in the wrong order: {order} where head h is meant to read ⌊h / {len(own) // count}⌋{other}"


def _witness(site: Site, head: int) -> Witness:
    reads = site.reads
    assert reads is not None
    rows = [("keys of head", reads.keys), ("values of head", reads.values)]
    rows += [("meant", reads.meant(reads.keys or reads.values))]
    meant = rows[-1][1]
    marked = tuple((r, c) for r, (_, own) in enumerate(rows[:2]) for c, h in enumerate(own[:8]) if h != meant[c])
    table = Table(
        corner="query head",
        columns=tuple(str(q) for q in reads.queries[:8]),
        rows=tuple((name, tuple(float(h) for h in own[:8])) for name, own in rows if own),
        marked=marked,
    )
    values = {"query head": reads.queries[head], "meant": meant[head]}
    got = {n: own[head] for n, own in rows[:2] if own}
    said = " and ".join(f"the {name} {h}" for name, h in got.items())
    return Witness(f"query head {reads.queries[head]} reads {said}; meant: {meant[head]}", table, {**values, **got})


FAULT = Fault(
    name="kv-heads-misordered",
    stage="project",
    promises=("grouped",),
    severity="error",
    summary="Query heads that share keys and values read those of another group, or are added up before they read.",
    symptom="Weights trained elsewhere give worse outputs than there; with groups added up, more heads bring nothing.",
    why_silent="Shapes agree, since repeat and repeat_interleave give as many heads; training from scratch learns around the order.",
    fix="k.repeat_interleave(group, dim=1), or k[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2); never repeat, tile or cat, "
    "which repeat the heads as a whole. In einsum, view queries as (kv_heads, group) and keep both axes in the scores.",
    bad="""
import torch
import torch.nn.functional as F
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(24, 24), nn.Linear(24, 16), nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (self.q(x), *self.kv(x).chunk(2, -1)))
        k, v = k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.causal()))
""",
    good="""
import torch
import torch.nn.functional as F
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(24, 24), nn.Linear(24, 16), nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (self.q(x), *self.kv(x).chunk(2, -1)))
        k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.causal()))
""",
    sources=("fkodom/grouped-query-attention-pytorch#5", "Ainslie et al. 2023, GQA, section 2.2: arXiv:2305.13245"),
    look=look,
)
