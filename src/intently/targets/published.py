"""The factors of a released architecture, measured on a copy that is as released, for models that someone built upon it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

from torch import nn

from intently.targets.running import trace_once
from intently.targets.target import Target

# A second copy of a model with more parameters than this costs more than it tells.
MOST_PARAMETERS = 50_000_000
_RELEASED = ("transformers.", "torch.")


def is_own(model: nn.Module) -> bool:
    """Whether some part of the model is of a class that neither transformers nor torch brings."""
    return any(not type(m).__module__.startswith(_RELEASED) for m in model.modules())


def factors(target: Target) -> Mapping[str, float]:
    """The factor between q·k and the logits of each call, by its path, in the released class under the target's model.

    The released class is built from the model's own configuration and runs once, with the model's weights where they
    fit. Empty where there is no such class, or where it does not run.
    """
    model = target.model
    released = next((c for c in type(model).__mro__ if c.__module__.startswith("transformers.models.")), None)
    if released is None or sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS:
        return {}
    try:
        twin = released(copy.deepcopy(model.config)).eval()
        twin.load_state_dict(model.state_dict(), strict=False)
        sites = trace_once(dataclasses.replace(target, model=twin))
    except Exception:  # whatever a class makes of its configuration: then nothing is known
        return {}
    return {s.path: s.scale.value for s in sites if s.scale is not None and s.scale.value is not None}
