"""A tiny random model of any transformers model type, built and run once on the spot."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from intently.targets import shrink
from intently.targets.shrink_example import example
from intently.targets.shrink_redraw import redraw
from intently.targets.shrink_search import Failure, search

__all__ = ["Built", "CannotBuild", "build", "example", "model_types", "redraw"]

_CAUSAL = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",)
_MASKED = ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",)
_SEQ2SEQ = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES")
_WITH_OTHER_MODES = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    *reversed(_SEQ2SEQ),
)
_BASE = ("MODEL_MAPPING_NAMES", "MODEL_FOR_PRETRAINING_MAPPING_NAMES")


class CannotBuild(RuntimeError):
    """A model type that cannot be built here; the message is one sentence that says why and what to try."""


@dataclass(frozen=True)
class Built:
    """A tiny model in eval mode and float32, its configuration, and what kind of model it is.

    `kind` is `causal`, `masked`, `encoder-decoder`, or `encoder` (pictures and sound included).
    """

    model: nn.Module
    config: Any
    kind: str
    class_name: str


def model_types() -> tuple[str, ...]:
    """All model types that the installed transformers knows, in alphabetical order."""
    _transformers()
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    return tuple(sorted(auto.CONFIG_MAPPING_NAMES))


def build(
    model_type: str, class_name: str | None = None, *, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> Built:
    """A tiny random model of the transformers type `model_type`, of its main class or of `class_name`.

    `settings` are fields of its configuration to set otherwise than by default, in every part that has them.

    The main class is the causal language model of a decoder, the sequence-to-sequence model of an encoder-decoder, the
    masked language model of an encoder, else the bare model. Nothing is downloaded; the same seed gives the same
    weights.
    Raises CannotBuild, with the reason in one sentence.

    >>> built = build("llama")
    >>> built.kind, built.class_name, built.config.num_hidden_layers
    ('causal', 'LlamaForCausalLM', 2)
    """
    with _quiet(seed):
        config = _default_config(model_type)
        _set(config, settings or {})
        name = class_name or _main_class(model_type, config)
        try:
            return _build(model_type, name, config, seed)
        except CannotBuild:
            raise
        except ImportError as error:
            raise _cannot(name, Failure("package", error)) from error
        except Exception as error:  # whatever a model type does that none of the others did: still one sentence
            raise _cannot(name, Failure("construction", error)) from error


def _build(model_type: str, name: str, config: Any, seed: int) -> Built:
    model_class = _class(model_type, name)
    kind = _kind(model_type, name, config)
    config = shrink.part(config, getattr(model_class, "config_class", None) or type(config))
    decoder = kind == "causal" and "is_decoder" in type(config).__dataclass_fields__
    found = search(config, model_class, {"is_decoder": True} if decoder else {}, seed)
    if isinstance(found, Failure):
        raise _cannot(name, found) from found.error
    return Built(found, found.config, kind, name)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise CannotBuild(
            "hf: targets need the transformers package, which is not installed; pip install 'intently[transformers]'"
        ) from error


@contextlib.contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """No downloads, no log lines, no warnings, and a random state that is put back afterwards."""
    transformers = _transformers()
    import huggingface_hub.constants as hub

    level, offline = transformers.logging.get_verbosity(), hub.HF_HUB_OFFLINE
    variable = os.environ.get("HF_HUB_OFFLINE")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    hub.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            yield
    finally:
        transformers.logging.set_verbosity(level)
        hub.HF_HUB_OFFLINE = offline
        if variable is None:
            os.environ.pop("HF_HUB_OFFLINE", None)
        else:
            os.environ["HF_HUB_OFFLINE"] = variable


def _default_config(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = model_types()
    if model_type not in known:
        near = difflib.get_close_matches(model_type.lower(), known, n=4, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "see intently.targets.huggingface_build.model_types()"
        raise CannotBuild(f"transformers has no model type {model_type!r}; {hint}")
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise CannotBuild(
            f"{model_type} has no default configuration to shrink ({_sentence(error)}); "
            "give a folder with a config.json instead"
        ) from error


def _set(config: Any, settings: Mapping[str, Any]) -> None:
    """Set fields wherever a part of the configuration has them."""
    parts = [node for _, node in shrink._walk(config)]
    for field, value in settings.items():
        concerned = [p for p in parts if field in vars(p)]
        if not concerned:
            known = sorted({name for p in parts for name in vars(p) if not name.startswith("_")})
            near = difflib.get_close_matches(field, known, n=4, cutoff=0.5)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise CannotBuild(f"the configuration of {config.model_type} has no field {field!r}{hint}")
        for part in concerned:
            setattr(part, field, value)


def _names(mapping: str, model_type: str) -> tuple[str, ...]:
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, mapping, {}).get(model_type, ())
    return (found,) if isinstance(found, str) else tuple(found)


def _first(mappings: tuple[str, ...], model_type: str) -> str | None:
    return next((name for mapping in mappings for name in _names(mapping, model_type)), None)


def _main_class(model_type: str, config: Any) -> str:
    base = _first(_BASE, model_type)
    if getattr(config, "is_encoder_decoder", False):
        preferred = (_first(_SEQ2SEQ, model_type), base)
    else:
        # A type with both a masked and a causal head is an encoder that can be turned into a decoder, not the reverse.
        preferred = (
            _first(_MASKED, model_type), _first(_CAUSAL, model_type), _first(_WITH_OTHER_MODES, model_type), base,
        )  # fmt: skip
    for name in preferred:
        if name:
            return name
    raise CannotBuild(
        f"{model_type} is a part of a larger model and has no class of its own in transformers' tables; "
        f"name one: hf:{model_type}/ClassName"
    )


def _class(model_type: str, name: str) -> Any:
    transformers = _transformers()
    with contextlib.suppress(AttributeError, ImportError):
        return getattr(transformers, name)
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    try:
        module = importlib.import_module(f"transformers.models.{model_type_to_module_name(model_type)}")
        return getattr(module, name)
    except Exception as error:
        near = difflib.get_close_matches(name, [n for n in dir(transformers) if n[:1].isupper()], n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise CannotBuild(f"transformers has no class {name!r} for the model type {model_type}{hint}") from error


def _kind(model_type: str, name: str, config: Any) -> str:
    for kind, mappings in (("encoder-decoder", _SEQ2SEQ), ("masked", _MASKED), ("causal", _CAUSAL)):
        if any(name in _names(mapping, model_type) for mapping in mappings):
            if kind == "encoder-decoder" and not getattr(config, "is_encoder_decoder", False):
                return "causal"
            return kind
    if any(name in _names(mapping, model_type) for mapping in _WITH_OTHER_MODES):
        return "encoder-decoder" if getattr(config, "is_encoder_decoder", False) else "causal"
    if re.search(r"ForCausalLM$|LMHeadModel$", name):
        return "causal"
    if re.search(r"ForMaskedLM$", name):
        return "masked"
    # The bare model of a decoder is still causal; a bare encoder is not.
    if getattr(config, "is_encoder_decoder", False) and "Encoder" not in name:
        return "encoder-decoder"
    if _names(_CAUSAL[0], model_type) and not _names(_MASKED[0], model_type):
        return "causal"
    return "encoder"


def _cannot(name: str, failure: Failure) -> CannotBuild:
    cause = _sentence(failure.error)
    if failure.stage == "package":
        package = re.search(r"requires the (?:following )?(\S+) library|No module named '([^']+)'", str(failure.error))
        wanted = next((group for group in package.groups() if group), None) if package else None
        missing = f"needs the package {wanted}, which is not installed" if wanted else f"needs a package: {cause}"
        return CannotBuild(f"{name} {missing}")
    if failure.stage in ("size", "input"):
        return CannotBuild(f"a tiny {name} cannot be made: {cause}")
    did = {"configuration": "has no small configuration", "construction": "cannot be made small"}
    doing = did.get(failure.stage, "was made small but does not run")
    return CannotBuild(f"{name} {doing}: {cause}; give a folder with a config.json whose sizes fit")


def _sentence(error: Exception) -> str:
    """The first telling line of an error, short, with its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    nested = [line for line in lines if re.match(r"(\w+Error|ValueError): ", line)]
    text = (nested or lines or ["no message"])[0]
    return f"{type(error).__name__}: {text[:200].rstrip('.')}"
