"""Transformers models as targets: what they read, what they mean, and how they are switched and put back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'intently[transformers]'")

import transformers

from intently import Intent, Mask, Target
from intently.errors import CannotCheck
from intently.targets import huggingface
from intently.targets.huggingface_inputs import Pieces
from intently.targets.signature import lengths_for
from intently.targets.target import call

# What each type is published as: streams, their masks, the mask of its attention in words.
PUBLISHED = {
    "llama": ({"input_ids": "attention_mask"}, "causal"),
    "gpt2": ({"input_ids": "attention_mask"}, "causal"),
    "gpt_neox": ({"input_ids": "attention_mask"}, "causal"),
    "mistral": ({"input_ids": "attention_mask"}, "causal & window(5)"),
    "bert": ({"input_ids": "attention_mask"}, "full"),
    "modernbert": ({"input_ids": "attention_mask"}, "full in layer 0, window(2, 2) in layer 1"),
    "xlnet": ({"input_ids": "attention_mask"}, "full"),
    "fnet": ({"input_ids": None}, "full"),
    "t5": (
        {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"},
        "encoder-decoder: causal decoder, full encoder, full memory",
    ),
    "whisper": (
        {"input_features": None, "decoder_input_ids": "decoder_attention_mask"},
        "encoder-decoder: causal decoder, full encoder, full memory",
    ),
    "vit": ({"pixel_values": None}, "full"),
    "wav2vec2": ({"input_values": None}, "full"),
}


def run(target: Target, **others: Any) -> torch.Tensor:
    batch = target.batch(2, lengths_for(target.streams), dtype=torch.float32)
    with torch.no_grad():
        output = call(target.model, {**batch.arguments, **others})
    return output["logits"] if "logits" in output else output["last_hidden_state"]


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_streams_and_intent_are_as_published(model_type: str) -> None:
    target = huggingface.tiny(model_type)
    streams, meant = PUBLISHED[model_type]
    assert {s.argument: s.padding and s.padding.argument for s in target.streams} == streams
    assert all(s.padding is None or s.padding.keep for s in target.streams)
    assert target.intent is not None
    assert str(target.intent) == meant
    assert target.intent.origin == "read from the configuration"
    assert target.intent.scale_is_free
    assert target.known
    assert target.main.argument == list(streams)[-1]
    assert target.name == f"hf:{model_type} ({type(target.model).__name__})"
    assert torch.isfinite(run(target)).all()


@pytest.mark.parametrize("model_type", ["cpmant", "clip_text_model"])
def test_what_a_configuration_does_not_say_is_left_to_observation(model_type: str) -> None:
    target = huggingface.tiny(model_type)
    assert target.intent is not None
    assert target.intent.mask is None
    assert target.intent.origin == "observed"


def test_tokens_have_no_special_meaning() -> None:
    stream = huggingface.tiny("bart").stream("decoder_input_ids")
    config = huggingface.tiny("bart").model.config
    special = {config.pad_token_id, config.eos_token_id, config.bos_token_id, config.decoder_start_token_id}
    assert special <= stream.avoid
    assert not special & set(stream.ids.tolist())
    assert int(stream.ids.max()) < config.vocab_size


def test_whisper_hears_frames_of_two_steps() -> None:
    target = huggingface.tiny("whisper")
    frames = target.stream("input_features")
    assert frames.length is not None
    assert (frames.stride, frames.kind) == (2, "frames")
    assert frames.length == target.model.config.max_source_positions
    content = frames.make(1, frames.length, 0, torch.float32)
    assert content.shape == (1, target.model.config.num_mel_bins, 2 * frames.length)


def test_a_picture_is_cut_as_the_model_cuts_it() -> None:
    target = huggingface.tiny("vit")
    config = target.model.config
    pixels = target.stream("pixel_values")
    assert pixels.patch == config.patch_size
    assert pixels.positions(1) == (config.image_size // config.patch_size) ** 2


def test_pieces_change_only_their_own_steps() -> None:
    wave = Pieces("input_values", "frames", length=3, stride=4, whole=(13,), axis=0)
    content = torch.zeros(2, 13)
    changed = wave.change(content, 1, 2, seed=0)
    assert changed[0].eq(0).all()
    assert changed[1].ne(0).nonzero().flatten().tolist() == [8, 9, 10, 11]
    spectrogram = Pieces("input_features", "frames", length=5, whole=(1, 5, 2), axis=1)
    changed = spectrogram.change(torch.zeros(1, 1, 5, 2), 0, 3, seed=0)
    assert changed.ne(0).nonzero()[:, 2].unique().tolist() == [3]


# -- switches -------------------------------------------------------------------------------------------------------


def test_a_backend_is_put_back_even_after_an_error() -> None:
    target = huggingface.tiny("llama")
    before = target.model.config._attn_implementation
    eager = next(s for s in target.switches if s.name == "eager")
    assert eager.backend
    with eager.enter(target.model):
        assert target.model.config._attn_implementation == "eager"
        assert target.model.model.config._attn_implementation == "eager"
    assert target.model.config._attn_implementation == before == "sdpa"
    with pytest.raises(KeyError, match="by hand"), eager.enter(target.model):
        raise KeyError("by hand")
    assert target.model.config._attn_implementation == before


def test_a_model_with_one_implementation_has_no_backend_switch() -> None:
    target = huggingface.tiny("bloom")
    assert not [s for s in target.switches if s.backend]


def test_looking_switches_are_those_with_an_effect() -> None:
    names = {s.name: s for s in huggingface.tiny("llama").switches}
    assert names["use_cache=False"].looking
    assert names["output_attentions=True, eager"].looking  # sdpa has no weights to show
    shown = [s.name for s in huggingface.tiny("bert").switches]
    assert not [name for name in shown if "use_cache" in name]  # an encoder keeps no cache


# -- intent ---------------------------------------------------------------------------------------------------------


def small(kind: str, **changes: Any) -> Any:
    """A small configuration written by hand."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.AutoConfig.for_model(kind, vocab_size=64, **sizes, **changes)


def test_bert_as_a_decoder_is_causal() -> None:
    encoder = huggingface.from_model(transformers.BertModel(small("bert")))
    decoder = huggingface.from_model(transformers.BertLMHeadModel(small("bert", is_decoder=True)))
    assert (str(encoder.intent), str(decoder.intent)) == ("full", "causal")


def test_a_decoder_said_to_see_both_ways_is_not_causal() -> None:
    config = small("gemma3_text", head_dim=8, num_key_value_heads=2, use_bidirectional_attention=True)
    assert str(huggingface.from_model(transformers.Gemma3TextModel(config)).intent) == "window(2048, 2048)"


def test_a_window_is_read() -> None:
    wide = small("mistral", num_key_value_heads=2, sliding_window=64)
    narrow = small("mistral", num_key_value_heads=2, sliding_window=3)
    assert str(huggingface.from_model(transformers.MistralForCausalLM(wide)).intent) == "causal & window(64)"
    assert str(huggingface.from_model(transformers.MistralForCausalLM(narrow)).intent) == "causal & window(3)"


# -- a model that is given ------------------------------------------------------------------------------------------


def test_a_given_model_takes_the_same_route_and_is_left_as_it_was() -> None:
    model = transformers.LlamaForCausalLM(small("llama", num_key_value_heads=2)).train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    target = Target(model, name="mine").ready()
    assert (target.name, str(target.intent), target.known) == ("mine", "causal", True)
    assert [s.name for s in target.switches if s.backend] == ["eager"]
    assert model.training
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_what_is_said_of_a_given_model_holds() -> None:
    model = transformers.LlamaForCausalLM(small("llama", num_key_value_heads=2))
    target = Target(model, Intent(Mask.full()), length=6).ready()
    assert str(target.intent) == "full"
    assert target.main.length == 6


def test_a_class_of_ones_own_is_held_to_the_usual_scale() -> None:
    class Mine(transformers.LlamaForCausalLM):
        pass

    target = huggingface.from_model(Mine(small("llama", num_key_value_heads=2)))
    assert not target.known
    assert target.intent is not None
    assert not target.intent.scale_is_free


# -- a folder -------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(small("llama", num_key_value_heads=2)).eval()
    model.save_pretrained(tmp_path)
    return tmp_path, model


def test_a_folder_gives_its_own_weights(saved: tuple[Path, Any]) -> None:
    path, model = saved
    target = huggingface.folder(path)
    assert target.name == f"{path.name} (LlamaForCausalLM)"
    assert not target.notes
    ids = torch.tensor([[20, 30, 40]])
    with torch.no_grad():
        assert torch.equal(target.model(ids).logits, model(ids).logits)


def test_a_folder_without_weights_says_that_they_are_random(saved: tuple[Path, Any]) -> None:
    path, _ = saved
    (path / "model.safetensors").unlink()
    target = huggingface.folder(path)
    assert target.model.config.hidden_size == 32
    assert "holds no weights" in target.notes[0]


def test_weights_that_are_not_there_are_told(saved: tuple[Path, Any]) -> None:
    path, _ = saved
    config = json.loads((path / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (path / "config.json").write_text(json.dumps(config))
    assert "lacks 9 weights of LlamaForCausalLM" in huggingface.folder(path).notes[0]


def spoil_weights(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"no tensors here")


def spoil_configuration(path: Path) -> None:
    (path / "config.json").write_text("{")


def name_no_type(path: Path) -> None:
    (path / "config.json").write_text("{}")


def name_an_unknown_type(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "lama"}')


def bring_own_code(path: Path) -> None:
    said = {"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}, "architectures": ["Mine"]}
    (path / "config.json").write_text(json.dumps(said))
    (path / "mine.py").write_text("raise SystemExit('code in a folder was run')")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_weights, "cannot be loaded"),
        (spoil_configuration, "cannot be read"),
        (name_no_type, "names no model_type"),
        (name_an_unknown_type, "did you mean llama"),
        (bring_own_code, "code in a folder is not run"),
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_sentence(saved: tuple[Path, Any], spoil: Any, said: str) -> None:
    path, _ = saved
    spoil(path)
    with pytest.raises(CannotCheck, match=said):
        huggingface.folder(path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CannotCheck, match="an adapter, not a model"):
        huggingface.folder(tmp_path)


# -- what cannot be checked -----------------------------------------------------------------------------------------


def test_an_unknown_type_names_what_is_near() -> None:
    with pytest.raises(CannotCheck, match="did you mean llama"):
        huggingface.tiny("llamma")


def test_no_type_at_all_is_told() -> None:
    with pytest.raises(CannotCheck, match="names no model type"):
        huggingface.tiny("")


def test_an_unknown_class_is_named() -> None:
    with pytest.raises(CannotCheck, match="no class 'LlamaForPoetry'"):
        huggingface.tiny("llama/LlamaForPoetry")


def test_a_class_may_be_named() -> None:
    assert huggingface.tiny("llama/LlamaModel").name == "hf:llama (LlamaModel)"


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(huggingface.importlib, "import_module", absent)
    for ask in (lambda: huggingface.tiny("llama"), lambda: huggingface.folder(tmp_path)):
        with pytest.raises(CannotCheck, match=r"pip install 'intently\[transformers\]'"):
            ask()


def test_asking_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    huggingface.tiny("gpt2", seed=3)
    assert torch.equal(before, torch.random.get_rng_state())


# -- settings beside the defaults -----------------------------------------------------------------------------------


def test_a_field_of_the_configuration_can_be_set() -> None:
    target = huggingface.tiny("falcon?alibi=true&new_decoder_architecture=false")
    assert target.model.config.alibi is True
    assert target.name == "hf:falcon (FalconForCausalLM, alibi=true, new_decoder_architecture=false)"
    assert huggingface.tiny("falcon").model.config.alibi is False


@pytest.mark.parametrize(
    ("text", "said"),
    [("falcon?alibis=true", "did you mean alibi"), ("falcon?alibi", "sets no field"), ("falcon?=1", "sets no field")],
)
def test_a_field_that_is_not_there_is_told(text: str, said: str) -> None:
    with pytest.raises(CannotCheck, match=said):
        huggingface.tiny(text)
