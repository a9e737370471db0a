"""Writing on: a model's most likely next token, and the next, each step computing only what is new."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from intently._typing import Float, Int

Step = Callable[[Tensor], Float[Tensor, "batch new vocabulary"]]


@torch.no_grad()
def greedy(step: Step, prompt: Int[Tensor, "batch length"], new: int) -> Int[Tensor, "batch longer"]:
    """The prompt and `new` tokens more, the most likely one each time.

    Args:
        step: from the tokens that are new since the last call to their logits; it keeps its own caches, and grows its
            own padding mask. It is called with the whole prompt first.
        prompt: `[batch, length]`; pads, if any, on the left.
        new: number of tokens to add.

    Returns:
        `[batch, length + new]`.

    A model that always says one more than the last token:

    >>> import torch
    >>> greedy(lambda tokens: torch.nn.functional.one_hot(tokens + 1, 10).float(), torch.tensor([[4, 5]]), new=3)
    tensor([[4, 5, 6, 7, 8]])
    """
    written = [prompt]
    for _ in range(new):
        written.append(step(written[-1])[:, -1:].argmax(dim=-1))
    return torch.cat(written, dim=1)
