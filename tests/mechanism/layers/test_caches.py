"""The law of caches: the whole at once, prefill and steps, and chunks all say the same."""

from __future__ import annotations

import itertools

import pytest
import torch

from intently import Mask
from intently.mechanism.layers import (
    Attend,
    CrossAttention,
    Decoder,
    GrowingCache,
    MultiHeadAttention,
    PreallocatedCache,
    SlidingCache,
    TransformerBlock,
)
from intently.mechanism.positions import RelativeBias, Rotary, alibi, positions_from_padding

LENGTH, WINDOW = 11, 4
SPLITS = {"steps": [1] * LENGTH, "prefill and steps": [6] + [1] * 5, "chunks": [3, 1, 5, 2], "at once": [LENGTH]}
KEEP = torch.ones(3, LENGTH, dtype=torch.bool)
KEEP[0, :5] = False
KEEP[2, :1] = False

CACHES = {
    "growing": GrowingCache,
    "preallocated": lambda: PreallocatedCache(LENGTH),
    "sliding": lambda: SlidingCache(WINDOW),
}
MASKS = {"causal": Mask.causal(), "window": Mask.causal() & Mask.window(WINDOW)}


def relative() -> RelativeBias:
    bias = RelativeBias(8, 16, heads=4, bidirectional=False)
    torch.nn.init.normal_(bias.weight)
    return bias


SCHEMES = {
    "plain": lambda mask: {"attend": Attend(mask=mask)},
    "rotary": lambda mask: {"attend": Attend(mask=mask), "position": Rotary(4)},
    "interleaved": lambda mask: {"attend": Attend(mask=mask), "position": Rotary(2, layout="interleaved")},
    "sink": lambda mask: {"attend": Attend(mask=mask, sink=torch.nn.Parameter(torch.randn(4)))},
    "softcap": lambda mask: {"attend": Attend(mask=mask, softcap=2.0)},
    "relative": lambda mask: {"attend": Attend(mask=mask, bias=relative())},
    "alibi": lambda mask: {"attend": Attend(mask=mask, bias=alibi(4))},
}
PAIRS = [pair for pair in itertools.product(CACHES, MASKS) if pair != ("sliding", "causal")]


def in_parts(layer: MultiHeadAttention, states: torch.Tensor, cache, split: list[int], keep=None) -> torch.Tensor:
    outputs, stop = [], 0
    for size in split:
        start, stop = stop, stop + size
        more = {}
        if keep is not None:
            so_far = keep[:, :stop]
            more = {"mask": Mask.padding(keep=so_far), "positions": positions_from_padding(so_far)[:, start:]}
        outputs.append(layer(states[:, start:stop], cache=cache, **more))
        assert cache.length == stop
    return torch.cat(outputs, dim=1)


def layer_and_states(scheme: str, mask: Mask) -> tuple[MultiHeadAttention, torch.Tensor]:
    layer = MultiHeadAttention(16, heads=4, kv_heads=2, value_width=3, **SCHEMES[scheme](mask)).double()
    return layer, torch.randn(3, LENGTH, 16, dtype=torch.float64)


@pytest.mark.parametrize("padded", [False, True], ids=["", "left padding"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("cache", "mask"), PAIRS)
def test_parts_say_what_the_whole_says(cache, mask, scheme, padded):
    layer, states = layer_and_states(scheme, MASKS[mask])
    keep = KEEP if padded else None
    more = {"mask": Mask.padding(keep=KEEP), "positions": positions_from_padding(KEEP)} if padded else {}
    with torch.no_grad():
        whole = layer(states, **more)
        for split in SPLITS.values():
            parts = in_parts(layer, states, CACHES[cache](), split, keep)
            assert torch.allclose(parts, whole, rtol=1e-12, atol=1e-12)


def test_pads_before_the_text_change_nothing():
    """Not only consistent: a padded row says what its text alone says."""
    layer, states = layer_and_states("rotary", Mask.causal())
    with torch.no_grad():
        whole = layer(states, mask=Mask.padding(keep=KEEP), positions=positions_from_padding(KEEP))
        alone = layer(states[:1, 5:])
    assert torch.allclose(whole[:1, 5:], alone, rtol=1e-12, atol=1e-12)


def test_control_positions_that_start_anew_are_noticed():
    layer, states = layer_and_states("rotary", Mask.causal())
    cache = GrowingCache()
    with torch.no_grad():
        whole = layer(states)
        layer(states[:, :6], cache=cache)
        step = layer(states[:, 6:7], cache=cache, positions=torch.tensor([0]))
    assert not torch.allclose(step, whole[:, 6:7], atol=1e-3)


def test_control_a_step_aligned_top_left_is_noticed():
    layer, states = layer_and_states("plain", Mask.causal())
    free = MultiHeadAttention(16, heads=4, kv_heads=2, value_width=3).double()
    free.load_state_dict(layer.state_dict())
    cache = GrowingCache()
    with torch.no_grad():
        whole = layer(states)
        free(states[:, :6], cache=cache, mask=Mask.causal())
        wrong = free(states[:, 6:8], cache=cache, mask=Mask.causal().matrix(2, 8))
    assert not torch.allclose(wrong, whole[:, 6:8], atol=1e-3)


@pytest.mark.parametrize("mask", ["causal", "bottom-right causal", "causal & (window(4) | keys(0))", None])
def test_a_sliding_cache_refuses_a_mask_that_looks_further_back(mask):
    layer = MultiHeadAttention(16, heads=4, attend=Attend(mask=None if mask is None else Mask.parse(mask)))
    cache = SlidingCache(WINDOW)
    layer(torch.randn(3, 6, 16), cache=cache)
    with pytest.raises(ValueError, match="are not here"):
        layer(torch.randn(3, 1, 16), cache=cache)


def test_a_sliding_cache_accepts_a_mask_that_looks_less_far_back():
    layer = MultiHeadAttention(16, heads=4, attend=Attend(mask=Mask.causal() & Mask.window(WINDOW - 1)))
    states, cache = torch.randn(1, LENGTH, 16), SlidingCache(WINDOW)
    with torch.no_grad():
        assert torch.allclose(in_parts(layer, states, cache, SPLITS["chunks"]), layer(states), atol=1e-5)


def test_a_sliding_cache_does_not_grow():
    cache = SlidingCache(WINDOW)
    for _ in range(50):
        key, value = cache.append(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 3))
    assert key.shape == (1, 1, WINDOW, 2)
    assert value.shape == (1, 1, WINDOW, 3)
    assert cache.length == 50


def test_a_full_cache_says_by_how_much():
    cache = PreallocatedCache(4)
    cache.append(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2))
    with pytest.raises(ValueError, match="2 tokens after 3 need room for 5, the capacity is 4"):
        cache.append(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))
    assert cache.length == 3  # and is as it was


def test_another_layers_keys_are_refused():
    cache = GrowingCache()
    cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    with pytest.raises(
        ValueError, match=r"float32\[1, 1, 1, 4\] does not continue what is held, float32\[1, 2, 3, 4\]"
    ):
        cache.append(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))
    with pytest.raises(ValueError, match="differ in batch, heads or length"):
        cache.append(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 2, 4))


@pytest.mark.parametrize("make", [lambda: SlidingCache(0), lambda: PreallocatedCache(0)])
def test_sizes_below_one_are_refused(make):
    with pytest.raises(ValueError, match="at least 1"):
        make()


@pytest.mark.parametrize(("cache", "mask"), PAIRS)
def test_a_rejected_draft_is_forgotten(cache, mask):
    layer, states = layer_and_states("rotary", MASKS[mask])
    held = CACHES[cache]()
    with torch.no_grad():
        whole = layer(states)
        layer(states[:, :3], cache=held)
        held.crop(2)  # sliding holds the last 3 of 3
        rest = layer(states[:, 2:], cache=held)
    assert torch.allclose(rest, whole[:, 2:], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="cannot crop to 12 tokens; 11 were seen"):
        held.crop(12)


def test_a_sliding_cache_does_not_pretend_to_restore_what_it_dropped():
    cache = SlidingCache(WINDOW)
    cache.append(torch.zeros(1, 1, 9, 2), torch.zeros(1, 1, 9, 2))
    cache.crop(9)
    with pytest.raises(ValueError, match="cannot crop to 8 tokens; 9 were seen, and 9 to 9 can be restored"):
        cache.crop(8)


@pytest.mark.parametrize(("cache", "mask"), PAIRS)
def test_beams_are_reordered(cache, mask):
    layer, states = layer_and_states("rotary", MASKS[mask])
    order, held = torch.tensor([2, 0, 0]), CACHES[cache]()
    with torch.no_grad():
        layer(states[:, :8], cache=held)
        held.reorder(order)
        step = layer(states[:, 8:9], cache=held)
        expected = layer(torch.cat([states[order, :8], states[:, 8:9]], dim=1))[:, 8:]
    assert torch.allclose(step, expected, rtol=1e-12, atol=1e-12)


def test_a_growing_cache_lets_gradients_through():
    layer, states = layer_and_states("rotary", Mask.causal())
    layer(states).sum().backward()
    expected = layer.key.weight.grad.clone()
    layer.zero_grad()
    in_parts(layer, states, GrowingCache(), SPLITS["chunks"]).sum().backward()
    assert torch.allclose(layer.key.weight.grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("backend", ["stages", "fused"])
def test_a_preallocated_cache_gives_right_gradients_or_an_error(backend, kv_heads):
    layer = MultiHeadAttention(
        16, heads=4, kv_heads=kv_heads, attend=Attend(mask=Mask.causal(), backend=backend)
    ).double()
    states = torch.randn(3, LENGTH, 16, dtype=torch.float64)
    layer(states).sum().backward()
    expected = layer.key.weight.grad.clone()
    layer.zero_grad()
    try:
        in_parts(layer, states, PreallocatedCache(LENGTH), SPLITS["chunks"]).sum().backward()
    except RuntimeError as error:
        assert "inplace" in str(error)
    else:
        assert torch.allclose(layer.key.weight.grad, expected, rtol=1e-9, atol=1e-12)


def decoder() -> Decoder:
    blocks = [
        TransformerBlock(
            MultiHeadAttention(16, heads=4, kv_heads=2, position=Rotary(4), attend=Attend(mask=mask)),
            torch.nn.Linear(16, 16),
            norms=[torch.nn.RMSNorm(16) for _ in range(3)],
            cross=CrossAttention(16, heads=4, source_model=8),
        )
        for mask in (None, Mask.causal() & Mask.window(WINDOW))
    ]
    return Decoder(blocks, norm=torch.nn.LayerNorm(16)).double()


@pytest.mark.parametrize("split", SPLITS)
def test_a_whole_decoder_with_a_cache_of_its_own_for_each_block(split):
    model, states = decoder(), torch.randn(3, LENGTH, 16, dtype=torch.float64)
    source, source_keep = torch.randn(3, 5, 8, dtype=torch.float64), torch.ones(3, 5, dtype=torch.bool)
    source_keep[1, 3:] = False
    caches, outputs, stop = [PreallocatedCache(LENGTH), SlidingCache(WINDOW)], [], 0
    with torch.no_grad():
        whole = model(states, keep=KEEP, source=source, source_keep=source_keep)
        memory = model.read(source)
        for size in SPLITS[split]:
            start, stop = stop, stop + size
            part = model(
                states[:, start:stop], keep=KEEP[:, :stop], caches=caches, source=memory, source_keep=source_keep
            )
            outputs.append(part)
    assert torch.allclose(torch.cat(outputs, dim=1), whole, rtol=1e-11, atol=1e-11)


def test_a_decoder_says_what_does_not_fit():
    model, states = decoder(), torch.randn(3, 4, 16, dtype=torch.float64)
    source = torch.randn(3, 5, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="1 caches for 2 blocks"):
        model(states, source=source, caches=[GrowingCache()])
    caches = [GrowingCache(), GrowingCache()]
    model(states, source=source, caches=caches)
    with pytest.raises(ValueError, match="keep speaks of 1 tokens; 4 cached and 1 new ones make 5"):
        model(states[:, :1], source=source, caches=caches, keep=KEEP[:, :1])
