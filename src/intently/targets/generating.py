"""What a transformers model's own `generate` gives at each new token, beside one forward over the same tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from intently.targets.feeding import Feed, Way
from intently.targets.stream import Batch
from intently.targets.target import Target, call

NEW = 4  # tokens generated


def generation(model: Any, target: Target, way: Way) -> Feed | None:
    """How to let a model generate; None where it has no `generate`, or one of its own making."""
    mixin = getattr(sys.modules.get("transformers"), "GenerationMixin", None)
    usual = mixin is not None and getattr(type(model), "generate", None) is mixin.generate
    if not usual or target.main.kind != "tokens" or not model.can_generate():
        return None
    return Feed(replace(way, name="generate"), "greedy", new=NEW)


def beside(model: Any, target: Target, batch: Batch, feed: Feed) -> tuple[Tensor, Tensor]:
    """`[batch, new token, vocabulary]` twice, from greedy generation with the cache and from one forward."""
    main = target.main
    # Without a mask of its own, generate would guess one from the ids.
    given = dict(batch.arguments)
    kept = batch.kept[main.argument]
    if main.padding is not None and not main.argument.startswith("decoder_"):
        given[main.padding.argument] = main.padding.value(kept)
    if main.argument.startswith("decoder_") and model.generation_config.decoder_start_token_id is None:
        given["decoder_start_token_id"] = 0
    made = model.generate(
        **given, max_new_tokens=feed.new, min_new_tokens=feed.new, do_sample=False, num_beams=1, use_cache=True, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    generated = torch.stack([step.double() for step in made.logits], 1)
    given.pop("decoder_start_token_id", None)
    whole = call(model, _forward(target, given, kept, made.sequences[:, :-1], feed))
    return generated, whole.logits[:, -feed.new :].double()


def _forward(target: Target, given: Mapping[str, Any], kept: Tensor, tokens: Tensor, feed: Feed) -> dict[str, Any]:
    """The arguments of the forward: the prompt and what was generated, the mask grown by real tokens."""
    main = target.main
    arguments = {**given, main.argument: tokens}
    grown = torch.cat([kept, torch.ones(len(kept), tokens.shape[1] - kept.shape[1], dtype=torch.bool)], 1)
    if main.padding is not None and main.padding.argument in given:
        arguments[main.padding.argument] = main.padding.value(grown)
    if feed.way.positions and (feed.positions or not bool(kept.all())):
        arguments[feed.way.positions] = (grown.long().cumsum(1) - 1).clamp_min(0)
    return arguments
