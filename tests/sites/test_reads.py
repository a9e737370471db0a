"""Which head of the keys and values each query head reads, in several spellings, held against the rows themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intently.edits import regroup
from intently.sites import Settings, Site, Sizes, find, tracing

HEADS, KV, D = 6, 2, 4
GROUP = HEADS // KV
IN_ORDER, TILED = (0, 0, 0, 1, 1, 1), (0, 1, 0, 1, 0, 1)


def interleaved(t: Tensor) -> Tensor:
    return t.repeat_interleave(GROUP, 1)


def expanded(t: Tensor) -> Tensor:
    return t[:, :, None].expand(-1, -1, GROUP, -1, -1).reshape(t.shape[0], HEADS, *t.shape[2:])


def repeated(t: Tensor) -> Tensor:
    return t.repeat(1, GROUP, 1, 1)


def tiled(t: Tensor) -> Tensor:
    return torch.tile(t, (1, GROUP, 1, 1))


def stacked(t: Tensor) -> Tensor:
    return torch.cat([t] * GROUP, 1)


def picked(t: Tensor) -> Tensor:
    return t[:, [h % KV for h in range(HEADS)]]


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / D**0.5).softmax(-1) @ v


class Layer(nn.Module):
    def __init__(
        self, spread: Callable[[Tensor], Tensor], attend: Callable[..., Tensor], *, norm: bool = False
    ) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(HEADS * D, HEADS * D), nn.Linear(HEADS * D, 2 * KV * D)
        self.spread, self.attend, self.norm = spread, attend, norm

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (self.q(x), *self.kv(x).chunk(2, -1)))
        if self.norm:
            q, k = F.rms_norm(q, (D,)), F.layer_norm(k, (D,))
        return self.attend(q, self.spread(k), self.spread(v)).transpose(1, 2).flatten(2)


def only(model: nn.Module) -> Site:
    torch.manual_seed(0)
    (site,) = find(model.eval(), torch.randn(3, 5, HEADS * D))
    return site


@pytest.mark.parametrize("attend", [by_hand, F.scaled_dot_product_attention])
@pytest.mark.parametrize(
    ("spread", "order"),
    [
        (interleaved, IN_ORDER),
        (expanded, IN_ORDER),
        (repeated, TILED),
        (tiled, TILED),
        (stacked, TILED),
        (picked, TILED),
    ],
)
def test_every_spelling_of_a_repeat(spread: Callable, attend: Callable, order: tuple[int, ...]) -> None:
    heads = torch.arange(KV).reshape(1, KV, 1, 1).float()
    assert tuple(spread(heads).flatten().long().tolist()) == order  # the order in which rows really stand
    reads = only(Layer(spread, attend)).reads
    assert reads is not None
    assert (reads.keys, reads.values) == (order, order)
    assert reads.meant(reads.keys) == IN_ORDER


def test_norms_of_queries_and_keys_hide_nothing() -> None:
    reads = only(Layer(repeated, by_hand, norm=True)).reads
    assert reads is not None
    assert reads.keys == TILED


def test_heads_that_share_nothing_or_everything_are_not_grouped() -> None:
    plain = nn.MultiheadAttention(24, 6, batch_first=True).eval()
    x = torch.randn(3, 5, 24)
    assert [s.reads for s in find(plain, x, x, x)] == [None]

    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_hand(q, k[:, :1].expand(-1, HEADS, -1, -1), v[:, :1].expand(-1, HEADS, -1, -1))

    assert only(Layer(lambda t: t, shared)).reads is None


@pytest.mark.parametrize("where", ["scores", "output"])
def test_a_sum_over_the_group_is_seen(where: str) -> None:
    def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.unflatten(1, (KV, GROUP))
        if where == "scores":
            weights = torch.einsum("bhgid,bhjd->bhij", q, k).softmax(-1)
            return torch.einsum("bhij,bhjd->bhid", weights, v)
        return torch.einsum("bhgij,bhjd->bhid", torch.einsum("bhgid,bhjd->bhgij", q, k).softmax(-1), v)

    reads = only(Layer(lambda t: t, summed)).reads
    assert reads is not None
    assert reads.summed == GROUP


@pytest.mark.parametrize("attend", [by_hand, F.scaled_dot_product_attention])
def test_regrouped_is_what_repeat_interleave_gives(attend: Callable) -> None:
    torch.manual_seed(1)
    wrong, right = Layer(repeated, attend).double().eval(), Layer(interleaved, attend).double().eval()
    right.load_state_dict(wrong.state_dict())
    x = torch.randn(3, 5, HEADS * D, dtype=torch.float64)
    with torch.no_grad():
        meant, before = right(x), wrong(x)
        settings = Settings(keep=True, sizes=Sizes(3, frozenset({5})), edits={"(root)#0": regroup()})
        with tracing(wrong, {"x": x}, settings) as tracer:
            after = wrong(x)
    assert (before - meant).abs().max() > 1e-3
    torch.testing.assert_close(after, meant, rtol=1e-10, atol=1e-12)
    (site,) = tracer.sites()
    assert site.reads is not None
    assert site.reads.keys == IN_ORDER
