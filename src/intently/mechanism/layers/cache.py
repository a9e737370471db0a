"""Key and value caches: what a sequence has already said, kept so that each step computes only what is new."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from intently._typing import Float, Int
from intently.mechanism.door import show

KeyValue = tuple[Tensor, Tensor]


class Cache(Protocol):
    """What a layer asks of a cache. One cache serves one layer and one batch of sequences."""

    @property
    def length(self) -> int:
        """Tokens seen so far, which is the position of the next one; pads and dropped tokens count."""
        ...

    def append(self, key: Tensor, value: Tensor) -> KeyValue:
        """Add new keys and values along the second to last axis; give those that the new queries attend to.

        What comes back ends with what was added. So the first key given stands at `length - number of keys given`.
        """
        ...


class GrowingCache:
    """Keeps everything; grows by concatenation, and lets gradients through.

    >>> import torch
    >>> cache = GrowingCache()
    >>> key, value = cache.append(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    >>> key, value = cache.append(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    >>> cache.length, key.shape
    (6, torch.Size([1, 2, 6, 4]))
    """

    def __init__(self) -> None:
        self.length = 0
        self._held: KeyValue | None = None

    def append(
        self, key: Float[Tensor, "*batch kv_heads new width"], value: Float[Tensor, "*batch kv_heads new value_width"]
    ) -> KeyValue:
        """Add and give back everything so far."""
        _check_new(self, key, value, self._held)
        self._held = (key, value) if self._held is None else _joined(self._held, (key, value))
        self.length += key.shape[-2]
        return self._held

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens (a rejected draft)."""
        _check_crop(self, length, 0)
        self._held = _first(self._held, length)
        self.length = length

    def reorder(self, samples: Int[Tensor, " chosen"]) -> None:
        """Take over the samples named, in that order, along the first axis (beams)."""
        self._held = _chosen(self._held, samples)


class SlidingCache:
    """Keeps what a window needs: the last `window - 1` tokens beside the new ones; memory does not grow.

    The mask must look no further back, as `Mask.causal() & Mask.window(window)` does. A layer refuses one that does.

    >>> import torch
    >>> cache = SlidingCache(3)
    >>> key, value = cache.append(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    >>> key, value = cache.append(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    >>> cache.length, key.shape                                              # two earlier keys and the new one
    (6, torch.Size([1, 2, 3, 4]))
    """

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"SlidingCache: window is {window}; at least 1 is needed, the query's own key")
        self.window = window
        self.length = 0
        self._held: KeyValue | None = None

    def append(
        self, key: Float[Tensor, "*batch kv_heads new width"], value: Float[Tensor, "*batch kv_heads new value_width"]
    ) -> KeyValue:
        """Add; give the new ones and up to `window - 1` before them, which the first of the new may still see."""
        _check_new(self, key, value, self._held)
        given = (key, value) if self._held is None else _joined(self._held, (key, value))
        drop = max(0, given[0].shape[-2] - (self.window - 1))
        # Cloned: a view would keep the whole of a long prefill alive.
        self._held = given[0][..., drop:, :].clone(), given[1][..., drop:, :].clone()
        self.length += key.shape[-2]
        return given

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens; only back to where everything the window needs is still held."""
        held = 0 if self._held is None else self._held[0].shape[-2]
        first = self.length - held
        # The next query, at `length`, needs the window - 1 tokens before it.
        _check_crop(self, length, 0 if first == 0 else first + self.window - 1)
        self._held = _first(self._held, length - first)
        self.length = length

    def reorder(self, samples: Int[Tensor, " chosen"]) -> None:
        """Take over the samples named, in that order, along the first axis (beams)."""
        self._held = _chosen(self._held, samples)


class PreallocatedCache:
    """Keeps everything in buffers of fixed `capacity`, written in place: no copying, a bound on memory.

    For inference: writing in place spoils what autograd has kept, and a backward pass that needs it says so.

    >>> import torch
    >>> cache = PreallocatedCache(6)
    >>> key, value = cache.append(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    >>> cache.append(torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4))       # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: PreallocatedCache: 2 tokens after 5 need room for 7, the capacity is 6. ...
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"PreallocatedCache: capacity is {capacity}; at least 1 is needed")
        self.capacity = capacity
        self.length = 0
        self._buffers: KeyValue | None = None

    def append(
        self, key: Float[Tensor, "*batch kv_heads new width"], value: Float[Tensor, "*batch kv_heads new value_width"]
    ) -> KeyValue:
        """Write into the buffers; give a view of what is filled."""
        _check_new(self, key, value, self._buffers)
        stop = self.length + key.shape[-2]
        if stop > self.capacity:
            raise ValueError(
                f"PreallocatedCache: {key.shape[-2]} tokens after {self.length} need room for {stop}, the capacity is "
                f"{self.capacity}. Make it as long as the prompt and all that is to follow, or use GrowingCache"
            )
        if self._buffers is None:
            self._buffers = self._room_for(key), self._room_for(value)
        for buffer, new in zip(self._buffers, (key, value), strict=True):
            buffer[..., self.length : stop, :] = new
        self.length = stop
        return self._buffers[0][..., :stop, :], self._buffers[1][..., :stop, :]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens (a rejected draft)."""
        _check_crop(self, length, 0)
        self.length = length

    def reorder(self, samples: Int[Tensor, " chosen"]) -> None:
        """Take over the samples named, in that order, along the first axis (beams)."""
        self._buffers = _chosen(self._buffers, samples)

    def _room_for(self, new: Tensor) -> Tensor:
        return new.new_zeros(*new.shape[:-2], self.capacity, new.shape[-1])


def _joined(held: KeyValue, new: KeyValue) -> KeyValue:
    return torch.cat([held[0], new[0]], dim=-2), torch.cat([held[1], new[1]], dim=-2)


def _first(held: KeyValue | None, length: int) -> KeyValue | None:
    return None if held is None else (held[0][..., :length, :], held[1][..., :length, :])


def _chosen(held: KeyValue | None, samples: Tensor) -> KeyValue | None:
    return None if held is None else (held[0].index_select(0, samples), held[1].index_select(0, samples))


def _check_new(cache: object, key: Tensor, value: Tensor, held: KeyValue | None) -> None:
    who = type(cache).__name__
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"{who}: key {show(key)} and value {show(value)} differ in batch, heads or length")
    for name, new, old in zip(("key", "value"), (key, value), held or (), strict=False):
        if new.shape[:-2] != old.shape[:-2] or new.shape[-1] != old.shape[-1] or new.dtype != old.dtype:
            raise ValueError(
                f"{who}: {name} {show(new)} does not continue what is held, {show(old)}; only the length may differ. "
                "One cache used for two layers, or for another batch? Make one cache a layer and a batch"
            )


def _check_crop(cache: Cache, length: int, least: int) -> None:
    if not least <= length <= cache.length:
        raise ValueError(
            f"{type(cache).__name__}: cannot crop to {length} tokens; {cache.length} were seen, and "
            f"{least} to {cache.length} can be restored"
        )
