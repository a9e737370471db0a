"""Tiny random transformers models: they run, keep the relations of the real ones, and let every effect show."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'intently[transformers]'")

from intently.targets import shrink, shrink_roles
from intently.targets.huggingface_build import Built, CannotBuild, build, example, model_types, redraw
from intently.targets.shrink_example import first_floating, forward

TWELVE = {
    "llama": ("causal", "LlamaForCausalLM"),
    "gpt2": ("causal", "GPT2LMHeadModel"),
    "bert": ("masked", "BertForMaskedLM"),
    "t5": ("encoder-decoder", "T5ForConditionalGeneration"),
    "bart": ("encoder-decoder", "BartForConditionalGeneration"),
    "mistral": ("causal", "MistralForCausalLM"),
    "gemma2": ("causal", "Gemma2ForCausalLM"),
    "qwen3": ("causal", "Qwen3ForCausalLM"),
    "bloom": ("causal", "BloomForCausalLM"),
    "whisper": ("encoder-decoder", "WhisperForConditionalGeneration"),
    "vit": ("encoder", "ViTModel"),
    "deepseek_v3": ("causal", "DeepseekV3ForCausalLM"),
}


def output(built: Built, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return first_floating(forward(built.model, inputs))


def relative(changed: torch.Tensor, original: torch.Tensor) -> float:
    return float((changed - original).abs().max() / original.abs().max())


def change_first(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same batch with its earliest token, picture corner or sound frame changed, in the source if there is one."""
    name = next(iter(inputs))
    values = inputs[name].clone()
    if values.is_floating_point():
        values[..., :8] += 1.0
    else:
        values[:, 0] = (values[:, 0] - 16 + 1) % 48 + 16
    assert not torch.equal(values, inputs[name])
    return {**inputs, name: values}


@pytest.mark.parametrize("model_type", TWELVE)
def test_the_twelve_run_and_a_first_token_moves_the_last_output(model_type: str) -> None:
    built = build(model_type)
    assert (built.kind, built.class_name) == TWELVE[model_type]
    assert not built.model.training
    assert {p.dtype for p in built.model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in built.model.parameters()) < 1_000_000
    inputs = example(built)
    before = output(built, inputs)
    assert torch.isfinite(before).all()
    assert 0.1 < float(before.abs().max()) < 100
    after = output(built, change_first(inputs))
    assert relative(after[:, -1], before[:, -1]) > 1e-3


def test_negative_control_without_redraw_effects_are_smaller() -> None:
    import transformers

    built = build("llama")
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(built.config).eval()
    inputs = example(built)
    fresh = Built(plain, built.config, built.kind, built.class_name)
    swapped = {**inputs, "input_ids": inputs["input_ids"][:, [1, 0, *range(2, 7)]]}
    effects = [relative(output(model, swapped)[:, -1], output(model, inputs)[:, -1]) for model in (fresh, built)]
    assert effects[1] > 3 * effects[0]  # nearly uniform attention hardly sees the order of the first two tokens


def test_negative_control_a_mask_that_hides_everything_early_shows_nothing() -> None:
    built = build("llama")
    inputs = example(built)
    inputs["attention_mask"][:, :1] = 0
    changed = change_first(inputs)
    assert relative(output(built, changed)[:, -1], output(built, inputs)[:, -1]) < 1e-6


def test_class_name_overrides_and_turns_an_encoder_into_a_decoder() -> None:
    built = build("bert", "BertLMHeadModel")
    assert built.kind == "causal"
    assert built.config.is_decoder
    inputs = example(built)
    values = inputs["input_ids"].clone()
    values[:, -1] = (values[:, -1] - 16 + 1) % 48 + 16
    before, after = output(built, inputs), output(built, {**inputs, "input_ids": values})
    assert torch.equal(before[:, :-1], after[:, :-1])  # the future is hidden
    assert not build("bert").config.is_decoder


def test_unknown_type_names_the_nearest() -> None:
    with pytest.raises(CannotBuild, match=r"no model type 'lama'; did you mean .*llama"):
        build("lama")


def test_unknown_class_names_the_nearest() -> None:
    with pytest.raises(CannotBuild, match=r"no class 'LlamaForCausal'.*LlamaForCausalLM"):
        build("llama", "LlamaForCausal")


def test_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CannotBuild, match=r"pip install 'intently\[transformers\]'"):
        build("llama")


def test_all_types_are_listed() -> None:
    assert set(TWELVE) < set(model_types())
    assert list(model_types()) == sorted(model_types())


def test_same_seed_same_weights_and_other_seed_other_weights() -> None:
    first, again, other = (build("gpt2", seed=seed).model.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_build_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    build("gpt2")
    assert torch.equal(torch.rand(1), expected)


def test_grouped_heads_stay_grouped_and_single_groups_single() -> None:
    mistral = build("mistral").config  # 32 heads on 8 key-value heads
    assert mistral.num_attention_heads > mistral.num_key_value_heads > 1
    llama = build("llama").config  # 32 on 32
    assert llama.num_attention_heads == llama.num_key_value_heads


def test_head_width_apart_from_the_width_stays_apart() -> None:
    gemma = build("gemma2").config  # 8 heads of 256 in a width of 2304
    assert gemma.num_attention_heads * gemma.head_dim != gemma.hidden_size
    assert gemma.query_pre_attn_scalar == gemma.head_dim
    mistral = build("mistral").config
    assert mistral.num_attention_heads * mistral.head_dim == mistral.hidden_size


def test_latent_attention_keeps_its_proportions() -> None:
    config = build("deepseek_v3").config  # 128 without, 64 with rotation, values of 128
    assert config.qk_nope_head_dim == 2 * config.qk_rope_head_dim == config.v_head_dim
    assert config.qk_head_dim == config.qk_nope_head_dim + config.qk_rope_head_dim
    assert 0 < config.first_k_dense_replace < config.num_hidden_layers  # a dense layer and one of experts


def test_every_kind_of_layer_is_kept() -> None:
    config = build("gemma2").config
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert len(config.layer_types) == config.num_hidden_layers
    assert config.sliding_window == 5, "shorter than the sequences that a check tries"


def test_tied_weights_stay_tied() -> None:
    model = build("gpt2").model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]


def test_special_tokens_stay_inside_the_vocabulary_and_out_of_the_example() -> None:
    built = build("gpt2")  # its end-of-text token is 50256 of 50257
    assert 0 <= built.config.eos_token_id < built.config.vocab_size
    assert built.config.eos_token_id not in example(built)["input_ids"]


def test_example_sizes_are_as_asked() -> None:
    inputs = example(build("t5"), batch=3, length=5, source_length=6)
    assert inputs["input_ids"].shape == (3, 6)
    assert inputs["decoder_input_ids"].shape == (3, 5)
    assert inputs["attention_mask"].shape == (3, 6)


@pytest.mark.parametrize("model_type", ["swin", "swinv2", "clap"])
def test_a_picture_made_coarser_in_stages_is_small_and_whole_windows_fit_into_every_stage(model_type: str) -> None:
    config = build(model_type).config
    config = getattr(config, "audio_config", config)
    picture = config.spec_size if model_type == "clap" else config.image_size
    assert config.depths == (2, 2, 2, 2)  # a plain and a shifted layer each
    sides = [picture // config.patch_size // 2**stage for stage in range(4)]
    assert sides[0] < 56 / 2
    assert all(side % config.window_size == 0 for side in sides)


def test_widths_that_double_from_stage_to_stage_and_a_spectrogram_that_is_folded_keep_together() -> None:
    audio = build("clap").config.audio_config
    assert audio.hidden_size == 8 * audio.patch_embeds_hidden_size < 768
    assert audio.spec_size % audio.num_mel_bins == 0


def test_a_width_that_must_stay_is_told_by_the_sizes_in_the_message() -> None:
    config = build("fastspeech2_conformer_with_hifigan").config
    assert config.vocoder_config.model_in_dim == config.model_config.num_mel_bins == 80
    assert config.model_config.hidden_size < 384


def test_redraw_opens_closed_gates_and_keeps_norms_near_neutral() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Parameter(torch.zeros(1))
            self.layer_scale = torch.nn.Parameter(torch.full((6,), 1e-5))
            self.norm = torch.nn.LayerNorm(6)
            self.minus_one_norm = torch.nn.RMSNorm(6)
            self.linear = torch.nn.Linear(400, 6)

    block = Block()
    torch.nn.init.zeros_(block.minus_one_norm.weight)
    torch.nn.init.zeros_(block.linear.weight)
    redraw(block, 0)
    block.requires_grad_(False)
    assert 0.3 <= float(block.gate) <= 0.8
    assert bool(((block.layer_scale >= 0.3) & (block.layer_scale <= 0.8)).all())
    assert float((block.norm.weight - 1).abs().max()) <= 0.1
    assert float(block.minus_one_norm.weight.abs().max()) <= 0.1
    assert float(block.linear.weight.std()) == pytest.approx(1 / 20, rel=0.1)


def test_redraw_again_with_the_same_seed_changes_nothing() -> None:
    model = build("gemma2", seed=5).model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    redraw(model, 5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("hidden_size", "width"), ("n_embd", "width"), ("num_hidden_layers", "layers"), ("encoder_layers", "layers"),
        ("num_attention_heads", "heads"), ("num_key_value_heads", "key-value heads"),
        ("qk_rope_head_dim", "head width"),
        ("kv_lora_rank", "rank"), ("vocab_size", "vocabulary"), ("pad_token_id", "token"), ("sliding_window", "band"), ("vision_window_size", "window"),
        ("num_experts_per_tok", "chosen experts"), ("n_routed_experts", "experts"), ("conv_kernel_size", None),
        ("attention_dropout", None), ("num_channels", None), ("type_vocab_size", None), ("rope_theta", None),
    ],
)  # fmt: skip
def test_roles_are_told_from_names(name: str, role: str | None) -> None:
    assert shrink_roles.role(name) == role


def test_rotary_sections_are_shared_out() -> None:
    assert shrink._share([16, 24, 24], 8) == [2, 3, 3]
    assert shrink._share([16, 24, 24], 4) == [1, 1, 2]


def test_a_type_that_needs_a_missing_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    from intently.targets import huggingface_build, shrink_search

    def search(*arguments: object) -> shrink_search.Failure:
        return shrink_search.Failure("package", ImportError("Model requires the timm library but it was not found"))

    monkeypatch.setattr(huggingface_build, "search", search)
    with pytest.raises(CannotBuild, match="needs the package timm, which is not installed"):
        build("gpt2")


def test_layers_that_differ_from_the_rest_keep_differing() -> None:
    config = build("gemma4_text").config  # heads of 256, of 512 in its full-attention layers
    widths = {kind: config.per_layer_config[kind].head_dim for kind in ("sliding_attention", "full_attention")}
    assert widths["full_attention"] == 2 * widths["sliding_attention"] < 64


def test_a_part_of_a_composite_configuration_serves_a_class_made_for_it() -> None:
    built = build("llama4")  # a model of pictures and text whose causal class takes the text part
    assert built.class_name == "Llama4ForCausalLM"
    assert built.config.model_type == "llama4_text"
    assert output(built, example(built)).shape == (2, 7, built.config.vocab_size)


def test_a_list_of_runs_is_cut_to_the_layers_that_are_kept() -> None:
    config = build("gpt_neo").config  # [[["global", "local"], 12]] by default
    assert config.attention_layers == ["global", "local"]
    assert config.num_layers == 2


def test_a_pattern_of_kinds_keeps_layers_until_every_kind_was_there() -> None:
    config = build("recurrent_gemma").config  # two recurrent layers, then one that attends
    assert config.layers_block_type == ["linear_attention", "linear_attention", "sliding_attention"]
