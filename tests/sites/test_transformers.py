"""Tiny models of transformers: what their configurations say of heads, widths and masks is what the sites show."""

from __future__ import annotations

import pytest
import torch

from intently.sites import find

pytest.importorskip("transformers")
from intently.targets.huggingface_build import build

BACKENDS = ("eager", "sdpa")


def made(model_type: str, backend: str):
    built = build(model_type)
    built.model.set_attn_implementation(backend)
    return built


@pytest.mark.parametrize("backend", BACKENDS)
def test_llama(backend):
    built = made("llama", backend)
    config = built.config
    width = config.head_dim or config.hidden_size // config.num_attention_heads
    sites = find(built.model, input_ids=torch.arange(1, 15).reshape(2, 7))
    assert [s.path for s in sites] == [f"model.layers.{i}.self_attn" for i in range(config.num_hidden_layers)]
    for site in sites:
        assert (site.heads, site.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
        assert (site.head_dim, site.role, site.mask, site.queries, site.keys) == (width, "self", "causal", 7, 7)
        assert site.scale.value == pytest.approx(width**-0.5, rel=1e-4)
        assert site.kernel == "written out" if backend == "eager" else site.kernel.startswith("sdpa")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_line_is_the_models(backend):
    for site in find(made("llama", backend).model, input_ids=torch.arange(1, 15).reshape(2, 7)):
        assert site.source.file.endswith("modeling_llama.py")


@pytest.mark.parametrize("backend", BACKENDS)
def test_bert(backend):
    built = made("bert", backend)
    config = built.config
    keep = torch.ones(2, 7, dtype=torch.long)
    keep[0, 4:] = 0
    sites = find(built.model, input_ids=torch.arange(1, 15).reshape(2, 7), attention_mask=keep)
    assert len(sites) == config.num_hidden_layers
    for site in sites:
        width = config.hidden_size // config.num_attention_heads
        assert (site.heads, site.head_dim, site.role) == (config.num_attention_heads, width, "self")
        assert torch.equal(site.visible, keep.bool()[:, None, None].expand(2, site.heads, 7, 7))
        assert site.scale.value == pytest.approx(width**-0.5, rel=1e-4)
        assert "attention_mask" in site.side


@pytest.mark.parametrize("backend", BACKENDS)
def test_t5(backend):
    built = made("t5", backend)
    config = built.config
    sites = find(
        built.model, input_ids=torch.arange(1, 19).reshape(2, 9), decoder_input_ids=torch.arange(1, 15).reshape(2, 7)
    )
    encoder, decoder = config.num_layers, config.num_decoder_layers
    assert len(sites) == encoder + 2 * decoder
    shown = [(s.role, s.queries, s.keys, s.mask) for s in sites]
    assert shown[:encoder] == [("self", 9, 9, "full")] * encoder
    assert shown[encoder:] == [("self", 7, 7, "causal"), ("cross", 7, 9, "full")] * decoder
    for site in sites:
        assert (site.heads, site.head_dim) == (config.num_heads, config.d_kv)
        assert site.scale.value == pytest.approx(1.0, rel=1e-3)  # T5 divides by nothing
