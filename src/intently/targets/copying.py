"""A copy of a module; scripted functions that it holds cannot be copied, have no state, and are shared."""

from __future__ import annotations

import copy

import torch
from torch import nn


def copied(model: nn.Module) -> nn.Module:
    held = (value for module in model.modules() for value in vars(module).values())
    shared = {id(value): value for value in held if isinstance(value, torch.jit.ScriptFunction)}
    return copy.deepcopy(model, shared)
