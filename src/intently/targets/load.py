"""From the text on a command line to a Target: a Python object, a transformers type, a folder with weights, a graph in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from intently.errors import CannotCheck
from intently.intent import Intent
from intently.masks import MaskSyntaxError
from intently.targets.target import Target


def load(
    text: str,
    *,
    intent: str | None = None,
    tokens: int | None = None,
    features: int | None = None,
    length: int | None = None,
    padding: str | None = None,
    seed: int = 0,
) -> Target:
    """The target that `text` names (see the command line), with what else is said about it.

    Raises `CannotCheck` in one sentence when it cannot be loaded.
    """
    meant = _intent(intent) if intent is not None else None
    target = _named(text, seed, tokens)
    said = {"intent": meant, "tokens": tokens, "features": features, "length": length, "padding": padding}
    changes = {k: v for k, v in said.items() if v is not None}
    if target.streams and (changes.keys() - {"intent"}):
        # Streams that were read from a configuration give way to what the user says.
        target = _overridden(target, tokens=tokens, length=length, padding=padding)
    return replace(target, **changes)


def _intent(text: str) -> Intent:
    try:
        return Intent.parse(text)
    except (MaskSyntaxError, ValueError) as error:
        raise CannotCheck(
            f"--intent {text!r} is not a mask in words",
            cause=str(error),
            hint="causal, bidirectional, 'causal & window(4)', prefix(3)",
        ) from error


def _named(text: str, seed: int, tokens: int | None) -> Target:
    if text.startswith("hf:"):
        from intently.targets import huggingface

        return huggingface.tiny(text.removeprefix("hf:"), seed=seed)
    path = Path(text)
    if path.is_dir():
        from intently.targets import huggingface

        return huggingface.folder(path, seed=seed)
    if path.suffix == ".onnx":
        from intently.targets import onnx_file

        return onnx_file.load(path, tokens=tokens)
    if path.suffix == ".pt2":
        from intently.targets import exported

        return exported.load(path, tokens=tokens)
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        raise CannotCheck(
            f"{text} is a {path.suffix} file, which cannot be checked here",
            hint="name Python code that builds the model, path/file.py:NAME, or a folder with a config.json and weights",
        )
    from intently.targets import python

    return python.load(text)


def _overridden(target: Target, *, tokens: int | None, length: int | None, padding: str | None) -> Target:
    streams = []
    for stream in target.streams:
        if tokens is not None and stream.kind == "tokens":
            stream = replace(stream, vocab=tokens)
        if length is not None and stream.length is None:
            stream = replace(stream, length=length)
        if padding is not None and stream is target.main:
            stream = replace(stream, padding=None)
        streams.append(stream)
    return replace(target, streams=tuple(streams))
