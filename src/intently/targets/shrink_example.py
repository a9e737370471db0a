"""A smallest batch for a model, found from the signature of its forward and the sizes in its configuration."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from intently.targets import shrink_roles


def example(
    built_or_model: Any, batch: int = 2, length: int = 7, source_length: int = 9, seed: int = 0
) -> dict[str, Tensor]:
    """A batch that `model(**batch)` accepts: token ids (none of them special), pictures or sound, and a mask of ones.

    `length` counts tokens (of the decoder, where there is one), `source_length` those of an encoder that feeds a
    decoder; pictures and log-mel features have the size the configuration fixes. Several forms are tried where the
    configuration does not tell. Raises ValueError naming the required arguments when none fits.
    """
    model: nn.Module = built_or_model if isinstance(built_or_model, nn.Module) else built_or_model.model
    error: Exception | None = None
    batches = list(candidates(model, batch, length, source_length, seed))
    for inputs in batches:
        if len(batches) == 1:
            return inputs
        try:
            forward(model, inputs)
        except Exception as caught:
            error = error or caught
        else:
            return inputs
    names = ", ".join(_required(model)) or "none without a default"
    raise ValueError(f"no example batch fits {type(model).__name__}.forward (required arguments: {names})") from error


def forward(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    """`model(**inputs)` without gradients or warnings."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(**inputs)


def first_floating(output: Any) -> Tensor:
    """The main output: logits where there are some, else the first floating tensor with a batch axis."""
    if isinstance(output, dict):
        values = [output["logits"]] if output.get("logits") is not None else []
        values += list(output.values())
    else:
        values = list(output) if isinstance(output, tuple) else [output]
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            return value
        if isinstance(value, dict | tuple) and value:
            with contextlib.suppress(ValueError):
                return first_floating(value)
    raise ValueError(f"the output {type(output).__name__} holds no floating tensor with a batch axis")


_PATCHED = ((("patch_size",), 14), (("in_channels", "num_channels", "in_chans"), 3), (("temporal_patch_size",), 1))
_MAIN_INPUTS = ("input_ids", "pixel_values", "input_features", "input_values")


def _required(model: nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def candidates(model: nn.Module, batch: int, length: int, source_length: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Batches worth trying, the likeliest first."""
    accepted = inspect.signature(model.forward).parameters
    config: Any = model.config
    generator = torch.Generator().manual_seed(seed)
    decoder = "decoder_input_ids" in accepted and bool(getattr(config, "is_encoder_decoder", True))
    tokens = source_length if decoder else length
    main = getattr(model, "main_input_name", None) or "input_ids"
    order = [name for name in ([main] if isinstance(main, str) else main) if name in accepted]
    if "grid_thw" in accepted and "hidden_states" in accepted:
        order = ["hidden_states"]
    cut = "grid_thw" in accepted  # pictures come cut into patches, and their grid beside them
    order += [name for name in _MAIN_INPUTS if name in accepted and name not in order]
    forms: dict[str, list[Tensor]] = {}
    for name in order:
        found = _forms("patches" if cut and name != "input_ids" else name, model, config, batch, tokens, generator)
        if found:
            forms[name] = found
    if not forms:
        return
    extra: dict[str, Tensor] = {}
    if decoder:
        plain = token_ids(model, batch, length, generator)
        channels = _field(getattr(config, "decoder_config", None) or config, ("num_channels", "num_codebooks"))
        codes = channels if isinstance(channels, int) and channels > 4 else 0  # 3 and 4 are colours, not codebooks
        extra["decoder_input_ids"] = plain[..., None].expand(-1, -1, codes).contiguous() if codes else plain
    elif "decoder_input_values" in accepted:
        mel = _field(config, ("num_mel_bins", "feature_size")) or 80
        extra["decoder_input_values"] = torch.randn(batch, length, mel, generator=generator)
    if "bbox" in accepted:
        extra["bbox"] = torch.tensor([10, 10, 30, 40]).expand(batch, tokens, 4).contiguous()
    if cut:
        extra["grid_thw"] = torch.tensor([[1, 4, 4]]).repeat(batch, 1)
    first, *others = forms
    chosen = [(first,), *([tuple(forms)] if others else []), *((other,) for other in others)]
    for names in chosen:
        variants = [{}]
        for name in names:
            variants = [{**variant, name: form} for variant in variants for form in forms[name]]
        for variant in variants:
            inputs = {**variant, **extra}
            for name in _required(model):  # a mask of ones over the axis that is not the features'
                if name.endswith("_mask") and (over := variant.get(name.removesuffix("_mask"))) is not None:
                    inputs[name] = torch.ones(over.shape[0], over.shape[-1] if over.dim() == 2 else max(over.shape[1:]))
            if "attention_mask" in accepted and ("input_ids" in variant or "input_values" in variant):
                shape = variant["input_ids" if "input_ids" in variant else "input_values"].shape
                yield {**inputs, "attention_mask": torch.ones(shape[:2], dtype=torch.long)}
                if "input_ids" in variant:
                    continue
            yield inputs


def _forms(
    name: str, model: nn.Module, config: Any, batch: int, tokens: int, generator: torch.Generator
) -> list[Tensor]:
    """The shapes an input of this name may have under this configuration."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if name == "input_ids":
        plain = token_ids(model, batch, tokens, generator)
        codes = _field(config, ("num_codebooks", "num_vq"))
        return [plain, plain[..., None].expand(-1, -1, codes).contiguous()] if codes and codes > 1 else [plain]
    if name == "patches":  # 4 × 4 of them a picture
        patch, channels, frames = (_field(config, names) or usual for names, usual in _PATCHED)
        return [noise(batch * 16, channels * frames * patch * patch), noise(batch * 16, channels, patch, patch)]
    if name.startswith("pixel_values"):
        stated = _pair(_field(config, ("image_size", "img_size")))
        channels = _field(config, ("num_channels", "in_channels", "in_chans")) or 3
        frames = _field(config, ("num_frames",))
        # Any size may do where none is stated, and a small one is enough to most.
        sides = [stated] if stated else [(64, 64), (224, 224)]
        still = [noise(batch, channels, *side) for side in sides]
        if frames:
            return [*(noise(batch, frames, channels, *side) for side in sides), *still]
        return [*still, *(picture[:, None] for picture in still)]
    if name == "input_features":
        mel = _field(config, ("num_mel_bins", "input_feat_per_channel", "feature_size", "mel_bins", "input_feat_size",
                              "feature_projection_input_dim", "n_mels", "input_dim", "num_mel")) or 80  # fmt: skip
        source = _field(config, ("max_source_positions",))
        lengths = ([2 * source] if source and source <= 4096 else []) + [128, 8 * tokens]
        return [f for n in lengths for f in (noise(batch, mel, n), noise(batch, n, mel), noise(batch, 1, n, mel))]
    if name == "input_values":
        mel = _field(config, ("num_mel_bins",))
        frames = _field(config, ("max_length",))
        spectrogram = [noise(batch, frames, mel)] if mel and frames else []
        return [*spectrogram, 0.5 * noise(batch, 400 * tokens), 0.5 * noise(batch, 1, 400 * tokens)]
    return []


def token_ids(model: nn.Module, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Random ids inside the vocabulary, none of which the configuration gives a meaning."""
    config: Any = model.config
    vocabulary = _vocabulary(model, config)
    special: set[int] = set(range(16)) if vocabulary > 48 else {0, 1, 2}
    for node in _nodes(config):
        for name, value in vars(node).items():
            if shrink_roles.role(name) == "token":
                special.update(v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, int))
    ordinary = torch.tensor([i for i in range(vocabulary) if i not in special] or [0])
    return ordinary[torch.randint(len(ordinary), (batch, length), generator=generator)]


def _vocabulary(model: nn.Module, config: Any) -> int:
    held = [vars(node).get(name) for node in _nodes(config) for name in ("vocab_size", "n_vocab")]
    sizes = [size for size in held if type(size) is int]
    with contextlib.suppress(Exception):
        rows = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        sizes = [rows, *[size for size in sizes if size > 0]]
    return min(sizes, default=64)


def _nodes(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _nodes(value)


def _field(config: Any, names: tuple[str, ...]) -> Any:
    for node in _nodes(config):
        for name in names:
            value = vars(node).get(name)
            if value is not None and not isinstance(value, str | dict):
                return value
    return None


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return None
