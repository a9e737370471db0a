"""What a transformers model is meant to do, read from its configuration: mask by layer, windows, chunks, both ways or not."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from intently.intent import Intent
from intently.masks import Mask
from intently.targets import huggingface_build as building
from intently.targets import shrink_roles
from intently.targets.huggingface_inputs import Pieces
from intently.targets.target import Target

# Types with a causal head whose tokens see each other by rules of their own, which no mask in words states.
_OWN_RULES = frozenset({"cpmant"})
# Sizes that limit what a query sees in ways that are not read here, unless no check tries sequences as long.
_OTHER_WINDOWS = ("window_size", "attention_window", "block_size")
SHORTEST_WINDOW = 16
_LIMITS = ("sliding_window", "attention_chunk_size", "layer_types")


def intent_of(model: Any, kind: str, target: Target) -> Intent:
    """What a released architecture is meant to do, as far as its configuration says; a mask of None is then observed.

    Scales are as published, so that none is demanded.
    """
    mask, encoder = _masks(model, kind, target)
    layers: tuple[Mask, ...] | None = by_layer(text_fields(model.config), mask) if mask is not None else ()
    if kind in ("encoder-decoder", "encoder") and layers:
        # Which stack a window belongs to is not read, nor whether a bare encoder (of sound) looks ahead in it.
        layers = None if any(_is_narrow(m) for m in layers) else ()
    if layers is None:
        mask, encoder, layers = None, None, ()
    alike = set(layers)
    if len(alike) == 1:
        mask, layers = alike.pop(), ()
    origin = "read from the configuration" if mask is not None else "observed"
    return Intent(mask, encoder=encoder, scale_is_free=True, origin=origin, layers=layers)


def _is_narrow(mask: Mask) -> bool:
    """Whether a mask hides something for its distance at the lengths that a check tries."""
    return not bool((mask.matrix(SHORTEST_WINDOW) == mask.without_bands().matrix(SHORTEST_WINDOW)).all())


def _masks(model: Any, kind: str, target: Target) -> tuple[Mask | None, Mask | None]:
    config = text_fields(model.config)
    both_ways = (
        config.get("attn_type") == "bi"
        or config.get("is_causal") is False
        or config.get("use_bidirectional_attention") in (True, "all")
        or config.get("bidirectional") is True
    )
    if str(config.get("model_type")) in _OWN_RULES:
        return None, None
    if kind == "encoder-decoder":
        has_decoder = any(s.argument.startswith("decoder_") for s in target.streams)
        return (Mask.causal(), Mask.full()) if has_decoder else (None, None)
    if kind == "causal":
        masked_too = bool(building._names(building._MASKED[0], str(config.get("model_type"))))
        turned = config.get("is_decoder") is True or config.get("causal") is True
        return Mask.full() if both_ways or (masked_too and not turned) else Mask.causal(), None
    if config.get("is_decoder") is True or config.get("causal") is True:
        return Mask.causal(), None
    return Mask.full() if _sees_both_ways(model, kind, config, target) else None, None


def _sees_both_ways(model: Any, kind: str, config: Mapping[str, Any], target: Target) -> bool:
    """Whether an encoder is known to let every position see every other."""
    if any(
        isinstance(config.get(n), list | tuple) for n in ("depths", "num_heads", "num_attention_heads", "hidden_sizes")
    ):
        return False  # stages that see a part of the picture each
    if config.get("window_size") or config.get("block_sizes"):
        return False
    if target.main.kind in ("pixels", "frames", "features"):
        return not isinstance(target.main, Pieces) or target.main.argument == "input_values"
    masked = building._names(building._MASKED[0], str(config.get("model_type")))
    return kind == "masked" or bool(masked) or "Encoder" in type(model).__name__


def text_fields(config: Any) -> dict[str, Any]:
    """The fields of the configuration of the part that reads tokens; read as stored, since some properties raise."""
    part = config
    with contextlib.suppress(Exception):
        part = config.get_text_config(decoder=True)
    fields = dict(vars(part))
    for name in _LIMITS:  # some types store them under another name
        with contextlib.suppress(Exception):
            fields.setdefault(name, getattr(part, name))
    fields["model_type"] = getattr(type(part), "model_type", "") or getattr(config, "model_type", "")
    return fields


# -- windows --------------------------------------------------------------------------------------------------------


def by_layer(config: Mapping[str, Any], mask: Mask) -> tuple[Mask, ...] | None:
    """The mask of each layer, where windows or chunks narrow that of the model; () where none does, None where that is not known."""
    kinds = shrink_roles.kinds_of(config)
    if not kinds:
        alone = _narrowed(config, mask, "sliding_attention") or _narrowed(config, mask, "chunked_attention")
        if alone is not None:
            return (alone,)
        return None if _limited_otherwise(config) else ()
    layers = [_narrowed(config, mask, kind) or mask for kind in kinds]
    if not shrink_roles.are_known(kinds) and any(
        _is_narrow(m) for kind in shrink_roles.NEAR if (m := _narrowed(config, mask, kind)) is not None
    ):
        return None
    return tuple(layers) if set(layers) != {mask} else ()


def _narrowed(config: Mapping[str, Any], mask: Mask, kind: str) -> Mask | None:
    """The mask of a layer that sees only what is near; None where the configuration gives no size for it."""
    size = config.get(shrink_roles.NEAR.get(kind, ""))
    if type(size) is not int or size < 1:
        return None
    if kind == "chunked_attention":
        return mask & Mask.chunks(size)
    if mask == Mask.causal():
        return mask & Mask.window(size)
    # Both ways the size is a radius: the flag of Gemma 3 stores it with the own position counted.
    radius = size - 1 if config.get("use_bidirectional_attention") else size
    return Mask.window(radius, radius)


def _limited_otherwise(config: Mapping[str, Any]) -> bool:
    """Whether a window or block that is not read here is so small that it hides something at the lengths that a check tries."""
    sizes = [size for name in _OTHER_WINDOWS for size in _numbers(config.get(name))]
    return any(0 < size < SHORTEST_WINDOW for size in sizes)


def _numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if type(v) is int]
