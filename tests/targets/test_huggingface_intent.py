"""Intents read from the configurations of transformers, held against the masks that the models are seen to use."""

from __future__ import annotations

import pytest
import torch

from intently import Mask
from intently.targets import huggingface
from intently.targets.huggingface_intent import by_layer
from intently.targets.running import Runner

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = "causal & window(4)"


def built(kind: str, **changes):
    config = transformers.AutoConfig.for_model(kind, **SIZES, **changes)
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if kind == "modernbert" else transformers.AutoModelForCausalLM
    return huggingface.from_model(auto.from_config(config).eval())


@pytest.mark.parametrize(
    ("kind", "changes", "layers"),
    [
        ("mistral", {"sliding_window": 4}, [WINDOW, WINDOW, WINDOW]),
        ("mistral", {"sliding_window": None}, ["causal"] * 3),
        ("phi3", {"sliding_window": 4}, [WINDOW, WINDOW, WINDOW]),
        ("starcoder2", {"sliding_window": 4}, [WINDOW, WINDOW, WINDOW]),
        ("qwen2", {"sliding_window": 4}, ["causal"] * 3),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, ["causal", WINDOW, WINDOW]),
        ("gemma2", {"sliding_window": 4, "head_dim": 8}, [WINDOW, "causal", WINDOW]),
        ("gemma3_text", {"sliding_window": 4, "head_dim": 8, "sliding_window_pattern": 3}, [WINDOW, WINDOW, "causal"]),
        (
            "gemma3_text",
            {"sliding_window": 6, "head_dim": 8, "sliding_window_pattern": 3, "use_bidirectional_attention": True},
            ["window(3, 3)", "window(3, 3)", "full"],
        ),
        ("cohere2", {"sliding_window": 4, "sliding_window_pattern": 2}, [WINDOW, "causal", WINDOW]),
        (
            "llama4_text",
            {"attention_chunk_size": 4, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 40,
             "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
            ["causal & chunks(4)", "causal", "causal & chunks(4)"],
        ),
        ("modernbert", {"local_attention": 6, "global_attn_every_n_layers": 2}, ["full", "window(3, 3)", "full"]),
        (
            "gpt_neo",
            {"window_size": 4, "num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local"], 1], [["local"], 1]]},
            ["causal", WINDOW, WINDOW],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_masks_read_are_those_that_run(kind, changes, layers) -> None:
    target = built(kind, **changes)
    runner = Runner(target)
    lengths = {s.argument: 11 for s in target.streams}
    sites = runner.traced(target.batch(2, lengths, dtype=runner.dtype), keep=False)[1]
    assert len(sites) == 3
    for site, phrase in zip(sites, layers, strict=True):
        meant = target.intent.mask_at(site.path)
        assert torch.equal(meant.matrix(11), Mask.parse(phrase).matrix(11)), (site.path, str(meant))
        assert torch.equal(site.visible, meant.matrix(11).expand(site.visible.shape)), (site.path, site.mask)
    assert target.intent.origin == "read from the configuration"


@pytest.mark.parametrize(
    ("config", "mask", "layers"),
    [
        ({}, Mask.causal(), ()),
        ({"sliding_window": None}, Mask.causal(), ()),
        ({"sliding_window": 4}, Mask.causal(), (Mask.parse(WINDOW),)),
        ({"sliding_window": 4}, Mask.full(), (Mask.window(4, 4),)),
        ({"sliding_window": 4, "layer_types": ["full_attention"] * 2}, Mask.causal(), ()),
        ({"sliding_window": 4, "layer_types": ["a rule of its own", "full_attention"]}, Mask.causal(), None),
        ({"sliding_window": 400, "layer_types": ["a rule of its own", "full_attention"]}, Mask.causal(), ()),
        ({"attention_window": [8, 8]}, Mask.full(), None),
        ({"attention_window": [512, 512]}, Mask.full(), ()),
    ],
    ids=str,
)
def test_by_layer(config, mask, layers) -> None:
    assert by_layer(config, mask) == layers


def test_windows_of_two_stacks_are_left_to_observation() -> None:
    target = huggingface.tiny("t5gemma")
    assert str(target.intent) == "encoder-decoder: causal decoder, full encoder, full memory"
    assert target.model.config.decoder.sliding_window > 48, "hides nothing at the lengths tried"
