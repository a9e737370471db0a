"""Find the small sizes that a model's own code agrees with: try, read the failure, put fields back, try again."""

from __future__ import annotations

import inspect
import itertools
import re
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from intently.targets import shrink
from intently.targets.shrink_example import candidates, first_floating, forward
from intently.targets.shrink_redraw import redraw

MOST_PARAMETERS = 60_000_000
# The usual model needs one attempt, a fraction of a second; this bounds the search for the unusual one.
SECONDS = 12.0
# Two layers of a kind satisfy models that share weights between them; wider heads, rotary sections and group norms.
PROFILES = (
    shrink.Sizes(),
    shrink.Sizes(layers_of_a_kind=2, most_layers=12),
    shrink.Sizes(head_width=16),
    shrink.Sizes(head_width=32),
)

Changes = Mapping[shrink.Path, shrink.Change]
Fields = set[tuple[str, int | None, int | None]]  # changed, with their sizes before and after


@dataclass(frozen=True)
class Failure:
    """Why an attempt gave no running model: at which stage, the error, and the fields named where it arose."""

    stage: str  # "configuration" | "package" | "construction" | "size" | "input" | "forward"
    error: Exception
    suspects: frozenset[str] = frozenset()


def search(config: Any, model_class: Any, settings: Mapping[str, Any], seed: int) -> nn.Module | Failure:
    """The first model that can be made and run, or the failure of the plainest attempt."""
    deadline = time.monotonic() + SECONDS
    first: Failure | None = None
    plans = [shrink.plan(config, sizes) for sizes in PROFILES]
    tried: set[frozenset[tuple[shrink.Path, str]]] = set()

    def attempt_once(changes: Changes) -> nn.Module | Failure | None:
        key = frozenset((path, repr(change.value)) for path, change in changes.items())
        if key in tried or (first is not None and time.monotonic() > deadline):
            return None
        tried.add(key)
        return attempt(config, model_class, changes, settings, seed)

    filled = [{**plan, **shrink.fills(config, plan, sizes)} for plan, sizes in zip(plans, PROFILES, strict=True)]
    for number, changes in enumerate(_proposals(plans, filled)):
        if first is not None and number > 3 and "Config' object has no attribute" in str(first.error):
            break  # the model reads a setting that its configuration does not have; no size changes that
        while (result := attempt_once(changes)) is not None:
            if isinstance(result, nn.Module):
                return result
            first = first or result
            if result.stage in ("package", "input"):
                return result
            # The lines on which the model failed name the fields it could not agree with: give those back first.
            suspects = result.suspects
            changes = {path: change for path, change in changes.items() if path[-1] not in suspects}
    assert first is not None, "the plainest attempt is always made"
    return first


def _proposals(plans: list[dict[shrink.Path, shrink.Change]], filled: Sequence[Changes]) -> Iterator[Changes]:
    """Every profile whole, also with what the default leaves open, then the narrowest without one role or two."""
    yield from (plans[0], filled[0], {**filled[0], ("use_cache",): shrink.Change(False, "cache")})
    for plan, with_fills in zip(plans[1:], filled[1:], strict=True):
        yield plan
        yield with_fills
    roles = sorted({change.role for change in plans[0].values()}, key=_cost)
    for count, plan in ((1, plans[0]), (2, plans[0]), (1, plans[2])):
        for left_out in itertools.combinations(roles, count):
            yield {path: change for path, change in plan.items() if change.role not in left_out}


def _cost(role: str) -> tuple[int, str]:
    """Roles whose defaults cost little come first."""
    order = ("window", "state groups", "state", "expert groups", "rotary", "rotary width", "positions", "image",
             "rank", "chosen experts", "key-value heads", "head width", "layers", "heads", "experts", "token",
             "vocabulary", "width")  # fmt: skip
    return (order.index(role) if role in order else 0, role)


def attempt(
    config: Any, model_class: Any, changes: Changes, settings: Mapping[str, Any], seed: int
) -> nn.Module | Failure:
    """Make the model under `changes`, redraw its weights, run it once."""
    fields = {(path[-1], _held(config, path), _size(change.value)) for path, change in changes.items()}
    try:
        small = shrink.apply(config, changes, **settings)
    except Exception as error:
        return Failure("configuration", error, _suspects(error, fields))
    try:
        count, largest = _count(model_class, small)
        if count > MOST_PARAMETERS:
            message = f"it would still have {count / 1e6:.0f} million parameters, the largest {largest}"
            return Failure("size", ValueError(message))
        torch.manual_seed(seed)
        model = model_class(small).float().eval()
    except ImportError as error:
        return Failure("package", error)
    except Exception as error:
        return Failure("construction", error, _suspects(error, fields))
    return _run(model, seed, fields)


def _count(model_class: Any, config: Any) -> tuple[int, str]:
    """The number of parameters, counted without memory for them, and the largest as name[shape]."""
    try:
        with torch.device("meta"):
            model = model_class(config)
    except (NotImplementedError, RuntimeError):
        return 0, ""  # a constructor that reads its own weights cannot run without memory; make it in earnest
    parameters = dict(model.named_parameters())
    name = max(parameters, key=lambda name: parameters[name].numel(), default="")
    return sum(p.numel() for p in parameters.values()), f"{name}{list(parameters[name].shape)}" if name else ""


def _run(model: nn.Module, seed: int, fields: Fields) -> nn.Module | Failure:
    failure: Failure | None = None
    for gain in (1.0, 0.5, 0.2):
        redraw(model, seed, gain=gain)
        for inputs in candidates(model, 2, 7, 9, 0):
            try:
                output = first_floating(forward(model, inputs))
            except ImportError as error:
                return Failure("package", error)
            except Exception as error:
                failure = failure or Failure("forward", error, _suspects(error, fields))
                continue
            largest = float(output.abs().max())
            if largest < 1e4:  # false for NaN too
                return model
            failure = Failure("forward", ValueError(f"its output reaches {largest:.3g} with random weights"))
            break
        else:
            break
    if failure is None:
        names = ", ".join(p.name for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty)
        return Failure("input", ValueError(f"no example input is known for the arguments of its forward ({names})"))
    return failure


def _suspects(error: Exception, fields: Fields) -> frozenset[str]:
    """The changed fields that are named on the failing lines or in the message, or whose value is told there before and after."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line or "" for frame in frames if "transformers" in frame.filename]
    words = set(re.findall(r"[A-Za-z_]\w+", " ".join([*lines[-2:], str(error)])))
    sizes = {int(n) for n in re.findall(r"\d+", str(error))}
    return frozenset(name for name, old, new in fields if name in words or (old is not None and {old, new} <= sizes))


def _size(value: Any) -> int | None:
    return value if type(value) is int else None


def _held(config: Any, path: shrink.Path) -> int | None:
    """What a configuration says now under a path, where that is a number."""
    for name in path:
        config = vars(config).get(name) if hasattr(config, "__dict__") else None
    return _size(config)
