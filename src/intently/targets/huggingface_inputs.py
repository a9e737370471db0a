"""What a transformers model reads: its streams, found from an example batch that it accepts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from intently.errors import CannotCheck
from intently.targets import shrink_example, shrink_roles
from intently.targets.discover import attempt, moves
from intently.targets.signature import dtype_of, lengths_for, signature
from intently.targets.stream import Padding, Stream
from intently.targets.target import Target, call, tensors_of

# Plain content needs no more of a vocabulary than this; the ids of a large one take long to list.
MOST_IDS = 4096


@dataclass(frozen=True)
class Pieces(Stream):
    """Content of a fixed shape, `whole` behind the batch, cut along one axis into pieces of `stride` steps.

    A raw wave, the frames of a video, a spectrogram with a channel axis in front.
    """

    whole: tuple[int, ...] = ()
    axis: int = 0

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        return (batch, *self.whole)

    def place(self, sample: int, position: int) -> tuple[Any, ...]:
        before = (slice(None),) * self.axis
        return (sample, *before, slice(position * self.stride, (position + 1) * self.stride))


def with_streams(target: Target) -> Target:
    """The target with the streams of its transformers model, their key masks, and the stream that the output follows.

    Raises `CannotCheck` when no batch is found that the model accepts.
    """
    model = target.model
    try:
        given = shrink_example.example(model)
    except ValueError as error:
        raise CannotCheck(
            f"no inputs were found that {target.label} accepts",
            cause=str(error),
            hint="give an example call: Target(model, inputs={'input_ids': …})",
        ) from error
    streams = [stream for name, value in given.items() if (stream := _stream(model, name, value)) is not None]
    if not streams:
        raise CannotCheck(
            f"{target.label} reads {', '.join(given)}, and none of them is a sequence whose positions can be changed",
            hint="give an example call: Target(model, inputs={'input_ids': …})",
        )
    target = dataclasses.replace(target, streams=tuple(streams), output=streams[0].argument)
    error = attempt(target, target.streams)
    if error is not None:
        others = [n for n in given if n not in {s.argument for s in streams} and not n.endswith("attention_mask")]
        raise CannotCheck(
            f"{target.label} does not run on {', '.join(s.argument for s in streams)} alone",
            cause=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            + (f"; it also reads {', '.join(others)}" if others else ""),
            hint="give an example call: Target(model, inputs={'input_ids': …})",
        )
    target = dataclasses.replace(target, output=_followed(target))
    target = _with_memory(target)
    return dataclasses.replace(target, streams=tuple(_masked(target)))


def _followed(target: Target) -> str:
    """The stream whose positions the main output has: the decoder's, else the first whose number of them is an axis of it."""
    streams = target.streams
    decoder = [s for s in streams if s.argument.startswith("decoder_")]
    if decoder or len(streams) == 1:
        return (decoder or streams)[0].argument
    lengths = lengths_for(streams)
    with torch.no_grad():
        output = call(target.model, target.batch(2, lengths, dtype=dtype_of(target.model)).arguments)
    shape = next((t.shape[1:-1] for t in tensors_of(output) if t.dim() > 2), torch.Size())
    return next((s.argument for s in streams if s.positions(lengths[s.argument]) in shape), streams[0].argument)


_CROSS = re.compile(r"cross|enc(oder)?_?(dec(oder)?_?)?att|EncDec", re.IGNORECASE)

# Arguments by which a decoder that stands alone is given what it reads, and their key masks.
_MEMORY = {"encoder_hidden_states": "encoder_attention_mask", "cross_attention_states": ""}


def _with_memory(target: Target) -> Target:
    """The target with a stream for the states of an encoder, where the model holds cross-attention that reads them."""
    taken = signature(target.model)
    held = {s.argument for s in target.streams}
    if not _has_cross_attention(target.model):
        return target  # some encoders hand what they are given to self-attention, in place of their own states
    for name in (n for n in _MEMORY if n in taken and n not in held):
        for width in _memory_widths(target.model):
            # In front: a stream that comes later is the shorter one.
            streams = (Stream(name, "features", width=width), *target.streams)
            if attempt(target, streams) is None:
                wider = dataclasses.replace(target, streams=streams)
                if moves(wider, name):
                    target = wider
                break  # it runs and is not read: there is no cross-attention
    return target


def _has_cross_attention(model: nn.Module) -> bool:
    adds = any(vars(node).get("add_cross_attention") for node in shrink_example._nodes(model.config))
    return adds or any(_CROSS.search(name) for name, _ in model.named_modules())


def _memory_widths(model: nn.Module) -> list[int]:
    names = ("encoder_hidden_size", "cross_attention_hidden_size", "encoder_width", "hidden_size", "n_embd", "d_model")
    held = [vars(node).get(name) for node in shrink_example._nodes(model.config) for name in names]
    return list(dict.fromkeys(width for width in held if type(width) is int))


def _stream(model: nn.Module, name: str, value: Tensor) -> Stream | None:
    """The stream that an argument of this name and shape is; None for a mask or anything that is no sequence."""
    if name.endswith("attention_mask"):
        return None
    if not value.is_floating_point():
        return _tokens(model, name) if value.dim() == 2 else None
    batch, *whole = value.shape
    if batch != 2:  # patches cut beforehand: their first axis is no batch
        return None
    if name.startswith("pixel_values") and len(whole) == 3:
        height, width = whole[1:]
        patch = _patch(model.config, height, width)
        return Stream(
            name,
            "pixels",
            width=whole[0],
            patch=patch,
            side=(height, width),
            length=(height // patch) * (width // patch),
        )
    if len(whole) == 1:
        stride = max(1, whole[0] // 7)
        return Pieces(name, "frames", length=whole[0] // stride, stride=stride, whole=tuple(whole), axis=0)
    if len(whole) == 2:
        return _spectrogram(model, name, whole[0], whole[1])
    # [frame, channel, height, width] of a video, [channel, time, mel] of a spectrogram with channels
    axis = 0 if len(whole) == 4 else 1
    return Pieces(name, "frames", length=whole[axis], whole=tuple(whole), axis=axis)


def _tokens(model: nn.Module, name: str) -> Stream:
    vocabulary = shrink_example._vocabulary(model, model.config)
    avoided = set(range(16)) if vocabulary > 48 else {0, 1, 2}
    for node in shrink_example._nodes(model.config):
        for field, value in vars(node).items():
            if shrink_roles.role(field) == "token":
                avoided.update(v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, int))
    vocab = min(vocabulary, MOST_IDS)
    return Stream(name, "tokens", vocab=vocab, avoid=frozenset(i for i in avoided if 0 <= i < vocab))


def _spectrogram(model: nn.Module, name: str, first: int, second: int) -> Stream:
    """`[mel, time]` (whisper, whose convolutions halve the time) or `[time, mel]`."""
    source = shrink_example._field(model.config, ("max_source_positions",))
    convolved = any(isinstance(m, nn.Conv1d) and m.in_channels == first for m in model.modules())
    if convolved and source and second % source == 0:
        return Stream(name, "frames", width=first, stride=second // source, length=source)
    if convolved and not any(isinstance(m, nn.Linear) and m.in_features == second for m in model.modules()):
        return Stream(name, "frames", width=first, length=second)
    return Stream(name, "features", width=second, length=first)


def _patch(config: Any, height: int, width: int) -> int:
    """The side of the squares that are changed one at a time: the model's own patches, or an eighth of the picture."""
    own = shrink_example._pair(shrink_example._field(config, ("patch_size",)))
    least = min(height, width)
    tried = [own[0]] if own and own[0] == own[1] else []
    for patch in (*tried, least // 8, least // 4):
        if patch >= 1 and height % patch == 0 and width % patch == 0:
            return patch
    return least


def _masked(target: Target) -> Iterator[Stream]:
    """The streams of tokens and of states with the argument that carries their key mask; a mask over samples of sound is none."""
    taken = signature(target.model)
    for stream in target.streams:
        argument = "decoder_attention_mask" if stream.argument.startswith("decoder_") else "attention_mask"
        argument = _MEMORY.get(stream.argument, argument if stream.kind == "tokens" else "")
        if argument in taken and _accepts(target, stream, Padding(argument, keep=True)):
            stream = dataclasses.replace(stream, padding=Padding(argument, keep=True))
        yield stream


def _accepts(target: Target, stream: Stream, padding: Padding) -> bool:
    """Whether the model runs when a key mask with pads is passed for this stream."""
    lengths: Mapping[str, int] = lengths_for(target.streams)
    kept = torch.ones(2, stream.positions(lengths[stream.argument]), dtype=torch.bool)
    kept[0, -1] = False
    arguments = dict(target.batch(2, lengths, dtype=dtype_of(target.model)).arguments)
    try:
        with torch.no_grad():
            call(target.model, {**arguments, padding.argument: padding.value(kept)})
    except Exception:
        return False
    return True
