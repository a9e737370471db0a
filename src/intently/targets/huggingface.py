"""A transformers model as a target: built tiny, loaded or given, with the switches it offers."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intently.errors import CannotCheck
from intently.intent import Intent
from intently.targets import huggingface_build as building
from intently.targets import published
from intently.targets.huggingface_inputs import with_streams
from intently.targets.huggingface_intent import intent_of, text_fields
from intently.targets.packing import with_tellings
from intently.targets.signature import dtype_of, lengths_for, signature
from intently.targets.target import Switch, Target, call
from intently.targets.towers import with_towers

# Without weights a larger architecture is shrunk: random numbers of full size show no more.
MOST_RANDOM_PARAMETERS = 50_000_000


def tiny(text: str, *, seed: int = 0) -> Target:
    """A tiny random model of a transformers type, ready to check.

    `text` is `MODEL_TYPE` or `MODEL_TYPE/ClassName`, perhaps with fields of its configuration behind: `?field=value`,
    several joined by `&`, values as in JSON (`falcon?alibi=true`).

    Raises `CannotCheck`, with the reason in one sentence, when it cannot be built.

    >>> target = tiny("llama")
    >>> target.name, str(target.intent), [s.argument for s in target.streams]
    ('hf:llama (LlamaForCausalLM)', 'causal', ['input_ids'])
    """
    named, _, fields = text.partition("?")
    model_type, _, class_name = named.partition("/")
    if not model_type:
        raise CannotCheck("hf: names no model type", hint="hf:llama, or hf:bert/BertModel for one of its classes")
    _require(f"hf:{text}")
    try:
        built = building.build(model_type, class_name or None, seed=seed, settings=_settings(fields))
    except building.CannotBuild as error:
        raise CannotCheck(str(error)) from error
    with _quiet(seed):
        said = f", {fields.replace('&', ', ')}" if fields else ""
        return _target(built.model, built.kind, f"hf:{model_type} ({built.class_name}{said})")


def _settings(fields: str) -> dict[str, Any]:
    """`alibi=true&heads=3` as names and values; a value that is no JSON is a text."""
    settings: dict[str, Any] = {}
    for each in filter(None, fields.split("&")):
        name, equals, value = each.partition("=")
        if not (name and equals and value):
            raise CannotCheck(f"{each!r} sets no field", hint="hf:falcon?alibi=true")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def folder(path: str | Path, *, seed: int = 0) -> Target:
    """The model in a folder with a `config.json`; nothing is downloaded, and no code in the folder is run.

    Without weights beside it the architecture is built with random ones, shrunk when it is large, and a note says so.
    Raises `CannotCheck` when the folder holds no configuration, an unknown architecture or unreadable weights.
    """
    path = Path(path)
    _require(str(path))
    said = _configuration(path)
    with _quiet(seed):
        config, model_class, kind = _architecture(path, said)
        try:
            model, notes = _loaded(path, config, model_class, seed)
        except (CannotCheck, KeyboardInterrupt):
            raise
        except building.CannotBuild as error:
            raise CannotCheck(str(error)) from error
        except Exception as error:  # whatever a file in the folder makes of the loader: still one sentence
            raise CannotCheck(
                f"the model in {path} cannot be loaded",
                cause=building._sentence(error),
                hint="see that its files are whole and belong together",
            ) from error
        target = _target(model, kind, f"{path.resolve().name} ({model_class.__name__})")
    return dataclasses.replace(target, notes=(*notes, *target.notes))


def from_model(model: Any) -> Target:
    """The target of a transformers model (`PreTrainedModel`) that is already there; the model itself is not changed.

    Its intent is read from its configuration. A model with a part of a class outside transformers counts as someone's
    own: it is held to the factors of the released class that it is built upon, else to the usual scale. Raises
    `CannotCheck` when no inputs are found that it accepts.
    """
    config = model.config
    model_type = str(getattr(config, "model_type", "") or "")
    with _quiet(0), _evaluating(model):
        kind = building._kind(model_type, type(model).__name__, config)
        target = _target(model, kind, type(model).__name__)
        if not published.is_own(model):
            return target
        scales = published.factors(target)
    intent = dataclasses.replace(target.intent or Intent(), scale_is_free=False, scales=scales)
    return dataclasses.replace(target, known=False, intent=intent)


def completed(target: Target) -> Target:
    """A target whose model is a transformers model, with what is known of it filled in beside what it says itself."""
    known = from_model(target.model)
    streams = known.streams
    if target.length is not None:
        streams = tuple(s if s.length else dataclasses.replace(s, length=target.length) for s in streams)
    return dataclasses.replace(
        known,
        streams=streams,
        intent=_with_scales(target.intent, known.intent),
        name=target.name or known.name,
        constants={**known.constants, **target.constants},
        switches=(*known.switches, *target.switches),
        known=target.known or known.known,
        notes=(*target.notes, *known.notes),
    )


def _with_scales(stated: Intent | None, read: Intent | None) -> Intent | None:
    """A stated intent that says nothing of a factor takes those of the released class."""
    if stated is None or read is None or stated.scale is not None:
        return stated or read
    return dataclasses.replace(stated, scales={**read.scales, **stated.scales})


def _target(model: Any, kind: str, name: str) -> Target:
    target = with_tellings(with_towers(with_streams(Target(model, name=name, known=True))))
    target = dataclasses.replace(target, intent=intent_of(model, kind, target))
    return dataclasses.replace(target, switches=tuple(_switches(target)))


def _require(what: str) -> None:
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        raise CannotCheck(
            f"{what} needs the transformers package, which is not installed",
            hint="pip install 'intently[transformers]'",
        ) from error


@contextlib.contextmanager
def _quiet(seed: int) -> Iterator[None]:
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with building._quiet(seed):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# -- a folder -------------------------------------------------------------------------------------------------------


def _configuration(path: Path) -> Mapping[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        adapter = (path / "adapter_config.json").is_file()
        cause = "it holds an adapter, not a model" if adapter else ""
        hint = "merge the adapter into its model and save that" if adapter else "a folder that save_pretrained wrote"
        raise CannotCheck(f"{path} has no config.json", cause=cause, hint=hint)
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CannotCheck(f"{file} cannot be read", cause=building._sentence(error)) from error
    if not isinstance(said, dict) or not said.get("model_type"):
        raise CannotCheck(f"{file} names no model_type, so its architecture is not known")
    return said


def _architecture(path: Path, said: Mapping[str, Any]) -> tuple[Any, Any, str]:
    """The configuration, the class and the kind of the model in a folder."""
    from transformers import AutoConfig

    model_type = str(said["model_type"])
    try:
        known = model_type in building.model_types()
        if not known and said.get("auto_map"):
            raise CannotCheck(
                f"{path} holds a model of its own code ({model_type}), and code in a folder is not run",
                hint="build it in Python and name it path/file.py:NAME",
            )
        if not known:
            building._default_config(model_type)  # raises, and names what is near
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        names = [str(n) for n in said.get("architectures") or []]
        name = names[0] if names else building._main_class(model_type, config)
        return config, building._class(model_type, name), building._kind(model_type, name, config)
    except CannotCheck:
        raise
    except building.CannotBuild as error:
        raise CannotCheck(str(error)) from error
    except Exception as error:
        raise CannotCheck(f"{path / 'config.json'} cannot be used", cause=building._sentence(error)) from error


def _loaded(path: Path, config: Any, model_class: Any, seed: int) -> tuple[nn.Module, tuple[str, ...]]:
    patterns = (
        "model*.safetensors",
        "model.safetensors.index.json",
        "pytorch_model*.bin",
        "pytorch_model.bin.index.json",
    )
    if not any(found for pattern in patterns for found in path.glob(pattern)):
        return _random(path, config, model_class, seed)
    model, info = model_class.from_pretrained(
        path, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    missing = sorted(info.get("missing_keys", ()))
    notes = ()
    if missing:
        notes = (f"{path} lacks {len(missing)} weights of {model_class.__name__}: random ones, the first {missing[0]}",)
    return model.eval(), notes


def _random(path: Path, config: Any, model_class: Any, seed: int) -> tuple[nn.Module, tuple[str, ...]]:
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST_RANDOM_PARAMETERS:
        built = building._build(str(config.model_type), model_class.__name__, config, seed)
        return built.model, (f"{path} holds no weights: checked random and shrunk from {size / 1e6:.0f}M parameters",)
    model = model_class(config).float().eval()
    building.redraw(model, seed)
    return model, (f"{path} holds no weights: random ones of full size were checked ({size / 1e6:.1f}M parameters)",)


# -- switches -------------------------------------------------------------------------------------------------------


def _switches(target: Target) -> Iterator[Switch]:
    """The other attention implementations, the request for weights where it has an effect, and the cache on or off."""
    model = target.model
    others = [name for name in ("eager", "sdpa") if name != _implementation(model) and _settable(model, name)]
    for name in others:
        yield Switch(name, enter=_set_to(name), backend=True)
    plain = Switch("as it is")
    for how in (plain, *(Switch("eager", enter=_set_to("eager")) for name in others if name == "eager")):
        shown = _run(target, how, {"output_attentions": True})
        if shown is not None and any(_weights(shown)):
            name = "output_attentions=True" if how is plain else f"output_attentions=True, {how.name}"
            yield Switch(name, enter=how.enter, arguments={"output_attentions": True}, looking=True)
            break
    default = text_fields(model.config).get("use_cache")
    if isinstance(default, bool) and _takes(model, "use_cache"):
        mine, theirs = (_run(target, plain, {"use_cache": value}) for value in (default, not default))
        if mine is not None and theirs is not None and _holds_cache(mine) != _holds_cache(theirs):
            yield Switch(f"use_cache={not default}", arguments={"use_cache": not default}, looking=True)


def _implementation(model: Any) -> str:
    return str(getattr(model.config, "_attn_implementation", "") or "")


def _configs(model: Any) -> list[Any]:
    """Every configuration that a part of the model holds, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        for node in _nested(config) if hasattr(config, "_attn_implementation_internal") else ():
            found[id(node)] = node
    return list(found.values())


def _nested(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "_attn_implementation_internal"):
            yield from _nested(value)


def _set_to(name: str) -> Callable[[Any], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def enter(model: Any) -> Iterator[None]:
        from transformers.utils import logging

        before = [(config, config._attn_implementation_internal) for config in _configs(model)]
        level = logging.get_verbosity()
        logging.set_verbosity(50)  # critical: the change is announced in the condition's name, not in a log
        try:
            model.set_attn_implementation(name)
            yield
        finally:
            logging.set_verbosity(level)
            for config, implementation in before:
                config._attn_implementation_internal = implementation

    return enter


def _settable(model: Any, name: str) -> bool:
    """Whether some part of the model takes this implementation; one with a class for each does not."""
    from transformers import PreTrainedModel

    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel) and _chooses(m)]
    before = [_implementation(part) for part in parts]
    try:
        with _set_to(name)(model):
            return [_implementation(part) for part in parts] != before
    except Exception:
        return False


def _chooses(part: Any) -> bool:
    """Whether a part can be told its implementation; before transformers 4.57 none could, once it was built."""
    may = getattr(part, "_can_set_attn_implementation", None)
    return may is not None and hasattr(part, "set_attn_implementation") and may()


def _takes(model: Any, argument: str) -> bool:
    parameters = signature(model)
    return argument in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _run(target: Target, switch: Switch, arguments: Mapping[str, Any]) -> Any:
    """The output of one call with these arguments besides; None when the model does not take them."""
    if not all(_takes(target.model, name) for name in arguments):
        return None
    batch = target.batch(2, lengths_for(target.streams), dtype=dtype_of(target.model))
    try:
        with torch.no_grad(), switch.enter(target.model):
            return call(target.model, {**batch.arguments, **arguments})
    except Exception:
        return None


def _weights(output: Any) -> Iterator[Tensor]:
    """The attention weights in an output."""
    for name, value in output.items() if isinstance(output, Mapping) else ():
        if name.endswith("attentions"):
            values = value if isinstance(value, list | tuple) else (value,)
            yield from (True for v in values if isinstance(v, Tensor))  # type: ignore[misc]


def _holds_cache(output: Any) -> bool:
    names = ("past_key_values", "cache", "mems", "cache_params", "state")
    return isinstance(output, Mapping) and any(output.get(name) is not None for name in names)
