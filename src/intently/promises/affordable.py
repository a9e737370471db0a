"""Promise `affordable`: the kernel that runs is the fast one, and the cost grows as the mask allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Trial
from intently.report import Cell
from intently.sites import Site
from intently.sites.kernels import kernel_of
from intently.sites.measure import HIDDEN_NATS
from intently.targets.running import PLAIN

SAME = 1e-5  # the fast call's output may differ by this, relatively: float64 models may take their softmax in float32
SPARSE = 4  # a mask is sparse where no row sees more than one key in so many
LONG = 24  # keys from which on that can be told


@dataclass(frozen=True)
class Fast:
    """A call of torch's fused attention that stands for a site: its arguments, its kernel, and how far its output is off."""

    arguments: dict[str, Any]  # attn_mask, is_causal, scale
    kernel: str
    gap: float  # relative

    @property
    def stands_in(self) -> bool:
        return self.kernel not in ("math", "error") and self.gap <= SAME


@dataclass(frozen=True)
class Cost:
    """What makes one call cost more than its mask and shapes ask for, by name; and the call that would cost less."""

    site: Site
    reasons: frozenset[str]
    fast: Fast | None


def fast_call(site: Site) -> Fast | None:
    """The same attention as one call with a fused kernel, replayed; None where the call shows too little, or is no such attention."""
    tensors = site.tensors
    if (
        tensors is None
        or tensors.scores is None
        or tensors.logits is None
        or tensors.restore is None
        or site.visible is None
    ):
        return None
    if tensors.query is None or tensors.key is None or tensors.value is None or not site.rows.are_tokens or site.sink:
        return None
    if (
        site.scale is None
        or not site.scale.exact
        or site.scale.softcap
        or site.partial
        or site.visible.shape != tensors.scores.shape
    ):
        return None
    fit = tensors.fit
    if not bool(torch.isfinite(fit.slope).all()):
        return None
    query, key, value = (t.double() for t in (tensors.query, tensors.key, tensors.value))
    if query.shape[-2] != site.queries or key.shape[-2] != site.keys or value.shape[-2] != site.keys:
        return None
    same_scale = bool((fit.slope - fit.slope[0]).abs().amax() <= 1e-9 * fit.slope.abs().amax())
    scale = float(fit.slope[0]) if same_scale else 1.0
    query = query if same_scale else query * fit.slope[None, :, None, None]
    mask = _mask(site, fit.added)
    causal = isinstance(mask, str)
    width = max(query.shape[-1], value.shape[-1])
    asked = {
        "query": _wide(query, width), "key": _wide(key, width), "value": _wide(value, width), "mask": None if causal else mask,
        "dropout": 0.0, "causal": causal, "scale": scale, "enable_gqa": False,
    }  # fmt: skip
    try:
        output = F.scaled_dot_product_attention(
            asked["query"], asked["key"], asked["value"], attn_mask=asked["mask"], is_causal=causal, scale=scale
        )[..., : value.shape[-1]]
        output = tensors.restore(output).reshape(tensors.output.shape)
    except RuntimeError:
        return None
    gap = (output - tensors.output.double()).abs().amax() / output.abs().amax().clamp_min(1e-30)
    return Fast(
        {"attn_mask": asked["mask"], "is_causal": causal, "scale": scale},
        kernel_of(asked),
        float(torch.nan_to_num(gap, nan=1e9)),
    )


def _wide(tensor: Tensor, width: int) -> Tensor:
    return F.pad(tensor, (0, width - tensor.shape[-1])).contiguous()


def _mask(site: Site, added: Tensor) -> Tensor | str | None:
    """What to pass for a call's mask and bias: nothing, the word `causal`, a bool mask, or what is added to the logits."""
    seen = site.visible
    assert seen is not None
    near = torch.where(seen, added, torch.zeros_like(added))
    if float(near.abs().amax()) > 1e-9 * HIDDEN_NATS:
        return near.masked_fill(~seen, float("-inf"))
    if bool(seen.all()):
        return None
    triangle = torch.ones(site.queries, site.keys, dtype=torch.bool).tril()
    return "causal" if bool((seen == triangle).all()) else seen


def costs(trial: Trial, condition: Condition) -> list[Cost]:
    """Calls of one run that cost more than they need to, in order."""
    found = []
    shown: set[tuple[int, int]] | None = None
    for site in trial.sites(condition):
        reasons = set(site.refused)
        if not trial.target.known:
            reasons.update(_by_its_mask(site))
        fast = None
        if site.kernel == "written out" and not trial.target.known and _is_part_of_a_model(trial):
            fast = fast_call(site)
            shown = _maps_shown(trial, condition) if shown is None and fast is not None and fast.stands_in else shown
            if fast is not None and fast.stands_in and (site.queries, site.keys) not in (shown or ()):
                reasons.add("need_weights" if _is_torchs(trial, site) else "written out")
        if reasons:
            found.append(Cost(site, frozenset(reasons), fast if fast is not None else fast_call(site)))
    return found


def _by_its_mask(site: Site) -> Iterator[str]:
    """Masks that are passed whole although a flag, or a kernel that skips what is hidden, would do."""
    if site.visible is None or site.kind == "flex" or site.queries != site.keys or site.queries < 2:
        return
    triangle = torch.ones(site.queries, site.keys, dtype=torch.bool).tril()
    if site.mask_given and site.bias == "none" and bool((site.visible == triangle).all()):
        yield "triangle"
    if (
        site.keys >= LONG
        and int(site.visible.sum(-1).amax()) * SPARSE <= site.keys
        and bool((site.visible == site.visible[:1]).all())
    ):
        yield "sparse"


def _is_part_of_a_model(trial: Trial) -> bool:
    """A function of q, k and v is a formula to look at; its cost is judged where a model uses it."""
    return isinstance(trial.runner.model, nn.Module) and not any(s.part for s in trial.target.streams)


def _is_torchs(trial: Trial, site: Site) -> bool:
    try:
        return isinstance(
            trial.runner.model.get_submodule(site.path.split("#")[0].replace("(root)", "")), nn.MultiheadAttention
        )
    except AttributeError:
        return False


def _maps_shown(trial: Trial, condition: Condition) -> set[tuple[int, int]]:
    """Shapes of the maps that the model returns, or keeps in an attribute: those are made to be looked at."""
    kept = trial.runner.shapes(trial.batch(condition.layout), condition.switch)
    for module in trial.runner.model.modules():
        kept += [v.shape for v in vars(module).values() if isinstance(v, Tensor) and v.is_floating_point()]
    return {(int(s[-2]), int(s[-1])) for s in kept if len(s) > 2}


def try_on(trial: Trial) -> Iterable[Cell]:
    found = []
    for condition in trial.conditions:
        if condition.switch.name != PLAIN.name or cells.narrow(trial, condition) or condition.layout.padded:
            continue
        if cells.same_as(trial, condition):
            continue
        sites = trial.sites(condition)
        if not sites:
            found.append(Cell("affordable", condition.name, "not-applicable", note="no attention call was seen"))
            continue
        count = len(costs(trial, condition))
        note = f"{count} of {len(sites)} sites" if count else ""
        found.append(cells.cell("affordable", condition, float(count), 0.0, broken=count > 0, note=note))
    return found


PROMISE = Promise(
    name="affordable",
    statement="The kernel that runs is the fast one, and the cost grows as the mask allows.",
    applies_to="each site, a note",
    how="At each call of a traced run torch is asked which kernel runs, and asked again with one argument changed at a time; attention that "
    "is written out is replayed as one fused call. `error` counts calls that cost more than they need to. On the CPU's kernels.",
    sources=(
        "PyTorch documentation of F.scaled_dot_product_attention: the conditions of its kernels",
        "Dao et al. 2022: arXiv:2205.14135",
    ),
    try_on=try_on,
    error_means="calls that cost more than they need to:",
    per_site=True,
)
