"""What a model eats is found by trying; what cannot be found is said, with the names of the arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from intently import CannotCheck, Target
from intently.targets.signature import lengths_for
from intently.targets.stream import Stream
from intently.targets.target import call

WIDTH, VOCAB = 12, 23


class Attention(nn.Module):
    """One call of attention; `keep` is bool [batch, key] or None."""

    def __init__(self, width: int = WIDTH, heads: int = 3):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, keep=None):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = None if keep is None else keep[:, None, None, :]
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attn, self.head = nn.Embedding(VOCAB, WIDTH), Attention(), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids):
        return self.head(self.attn(self.embed(input_ids)))


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attn = nn.Linear(7, WIDTH), Attention()

    def forward(self, x):
        return self.attn(self.first(x))


class Pictures(nn.Module):
    def __init__(self, image_size: int = 16, patch: int = 4):
        super().__init__()
        self.image_size = image_size
        self.patches, self.attn = nn.Conv2d(3, WIDTH, patch, patch), Attention()
        self.places = nn.Parameter(torch.randn(1, (image_size // patch) ** 2, WIDTH))

    def forward(self, pixel_values):
        return self.attn(self.patches(pixel_values).flatten(2).mT + self.places)


class Learned(nn.Module):
    """Runs at one length alone: 10, that of its table."""

    def __init__(self):
        super().__init__()
        self.embed, self.places, self.attn = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Parameter(torch.randn(10, WIDTH)),
            Attention(),
        )

    def forward(self, tokens):
        return self.attn(self.embed(tokens) + self.places)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(17, WIDTH), nn.Embedding(19, WIDTH)
        self.core = nn.Transformer(WIDTH, 2, 1, 1, 20, 0.0, batch_first=True)

    def forward(self, src, tgt, src_key_padding_mask=None, tgt_key_padding_mask=None):
        return self.core(
            self.source(src), self.target(tgt), src_key_padding_mask=src_key_padding_mask,
            memory_key_padding_mask=src_key_padding_mask, tgt_key_padding_mask=tgt_key_padding_mask,
        )  # fmt: skip


def ready(model, **said) -> Target:
    return Target(model.eval() if isinstance(model, nn.Module) else model, **said).ready()


def runs(target: Target, samples: int = 3):
    """The target's own inputs fit its model."""
    lengths = lengths_for(target.streams)
    batch = target.batch(samples, lengths, dtype=torch.float32)
    with torch.no_grad():
        return call(target.model, batch.arguments), batch


def test_tokens():
    target = ready(Tokens())
    (stream,) = target.streams
    assert (stream.argument, stream.kind, stream.vocab, stream.length, stream.padding) == (
        "input_ids",
        "tokens",
        VOCAB,
        None,
        None,
    )
    assert target.main is stream
    output, batch = runs(target)
    assert output.shape == (3, 7, VOCAB) and batch.arguments["input_ids"].max() < VOCAB


def test_the_pad_id_is_no_content():
    model = Tokens()
    model.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=5)
    (stream,) = ready(model).streams
    assert {0, 5} <= stream.avoid and not {0, 5} & set(stream.ids.tolist())


@pytest.mark.parametrize("said", [{"tokens": 11}, {"tokens": VOCAB}])
def test_a_stated_vocabulary_is_kept(said):
    assert ready(Tokens(), **said).streams[0].vocab == said["tokens"]


def test_features():
    (stream,) = ready(Features()).streams
    assert (stream.argument, stream.kind, stream.width, stream.sequence_first) == ("x", "features", 7, False)
    assert ready(Features(), features=7, length=9).streams[0].length == 9


def test_pictures():
    target = ready(Pictures())
    (stream,) = target.streams
    assert (stream.argument, stream.kind, stream.width, stream.patch, stream.side) == (
        "pixel_values",
        "pixels",
        3,
        4,
        (16, 16),
    )
    assert stream.positions(7) == 16
    assert runs(target)[0].shape == (3, 16, WIDTH)


def test_a_fixed_length():
    (stream,) = ready(Learned()).streams
    assert (stream.length, stream.vocab) == (10, VOCAB)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_layers_say_their_layout(batch_first):
    layer = nn.TransformerEncoderLayer(WIDTH, 3, 20, batch_first=batch_first)
    for model in (layer, nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)):
        target = ready(model)
        (stream,) = target.streams
        assert (stream.argument, stream.width, stream.sequence_first) == ("src", WIDTH, not batch_first)
        assert (stream.padding.argument, stream.padding.keep) == ("src_key_padding_mask", False)
        shape = (3, 7, WIDTH) if batch_first else (7, 3, WIDTH)
        assert runs(target)[0].shape == shape


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_layer_of_torch(batch_first):
    target = ready(nn.MultiheadAttention(WIDTH, 3, batch_first=batch_first))
    assert [s.argument for s in target.streams] == ["query", "key", "value"]
    assert {s.width for s in target.streams} == {WIDTH}
    assert {s.sequence_first for s in target.streams} == {not batch_first}
    assert target.main.argument == "query"
    padding = target.stream("key").padding
    assert (padding.argument, padding.keep, padding.dtype) == ("key_padding_mask", False, torch.bool)


@pytest.mark.parametrize("batch_first", [True, False])
def test_decoder_layer_of_torch(batch_first):
    target = ready(nn.TransformerDecoderLayer(WIDTH, 3, 20, batch_first=batch_first))
    assert [s.argument for s in target.streams] == ["tgt", "memory"]
    assert target.main.argument == "tgt"
    assert target.stream("tgt").padding.argument == "tgt_key_padding_mask"
    assert target.stream("memory").padding.argument == "memory_key_padding_mask"
    lengths = lengths_for(target.streams)
    assert lengths["tgt"] != lengths["memory"]


def test_two_streams():
    target = ready(Translator())
    assert [(s.argument, s.kind, s.vocab) for s in target.streams] == [("src", "tokens", 17), ("tgt", "tokens", 19)]
    assert target.main.argument == "tgt"
    assert target.stream("src").padding.argument == "src_key_padding_mask"
    assert target.stream("tgt").padding.argument == "tgt_key_padding_mask"
    assert not target.stream("src").padding.keep


# -- padding --------------------------------------------------------------------------------------------------------


def masked(argument: str, *, keeps: bool, form: str = "batch key", boolean: bool = False):
    """A model of features whose mask argument has this name and this meaning."""

    class Padded(Features):
        def apply(self, x, mask):
            if mask is None:
                return self.attn(self.first(x))
            if form == "lengths":
                keep = torch.arange(x.shape[1])[None] < mask[:, None]
            else:
                if mask.dim() != len(form.split()) or (boolean and mask.dtype != torch.bool):
                    raise ValueError(f"the mask is {mask.dtype}{list(mask.shape)}")
                keep = mask.reshape(mask.shape[0], -1, mask.shape[-1])[:, -1].bool() == keeps
            return self.attn(self.first(x), keep)

    scope = {"Padded": Padded}
    exec(
        f"class Named(Padded):\n    def forward(self, x, {argument}=None):\n        return self.apply(x, {argument})",
        scope,
    )
    return scope["Named"]().eval()


KEEP = ("attention_mask", "attn_mask", "valid_mask", "input_mask", "src_attention_mask")
HIDE = ("key_padding_mask", "src_key_padding_mask", "padding_mask", "pad_mask", "is_pad")


@pytest.mark.parametrize("form", ["batch key", "batch 1 key", "batch 1 1 key"])
@pytest.mark.parametrize(("argument", "keeps"), [(n, True) for n in KEEP] + [(n, False) for n in HIDE])
def test_names_that_say_what_a_true_entry_means(argument, keeps, form):
    padding = ready(masked(argument, keeps=keeps, form=form)).streams[0].padding
    assert (padding.argument, padding.keep, padding.form, padding.optional, padding.observed) == (
        argument,
        keeps,
        form,
        True,
        False,
    )
    kept = torch.tensor([[True, True, False]])
    wanted = (kept if keeps else ~kept).reshape(padding.value(kept).shape)
    assert torch.equal(padding.value(kept).bool(), wanted)


def test_lengths():
    padding = ready(masked("lengths", keeps=True, form="lengths")).streams[0].padding
    assert (padding.argument, padding.form) == ("lengths", "lengths")
    assert padding.value(torch.tensor([[True, True, False], [True, True, True]])).tolist() == [2, 3]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("argument", ["mask", "src_mask", "mask_x"])
def test_an_ambiguous_name_is_observed(argument, keeps):
    padding = ready(masked(argument, keeps=keeps)).streams[0].padding
    assert (padding.argument, padding.keep, padding.observed) == (argument, keeps, True)


def test_bool_is_given_where_bool_is_wanted():
    assert ready(masked("attention_mask", keeps=True, boolean=True)).streams[0].padding.dtype == torch.bool


@pytest.mark.parametrize(("said", "keep"), [("mask", None), ("mask:keep", True), ("mask:hide", False)])
def test_what_the_user_says_stands(said, keep):
    padding = ready(masked("mask", keeps=True), padding=said).streams[0].padding
    assert padding.argument == "mask"
    assert padding.keep is (True if keep is None else keep)


def test_padding_that_the_model_does_not_take():
    with pytest.raises(CannotCheck, match=r"--padding names 'mask', which Features does not take.*it takes x"):
        ready(Features(), padding="mask")


# -- functions of q, k, v -------------------------------------------------------------------------------------------


def test_a_function_of_heads():
    def attention(q, k, v, attn_mask=None):
        assert q.dim() == 4
        return F.scaled_dot_product_attention(q, k, v, attn_mask)

    target = ready(attention)
    assert [s.argument for s in target.streams] == ["q", "k", "v"]
    assert all(s.heads for s in target.streams) and target.main.argument == "q"
    shape = target.stream("q").shape(2, 5)
    assert shape == (2, 3, 5, 8)


def test_a_function_without_heads():
    def attention(query, key, value):
        assert query.dim() == 3
        return torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1) @ value

    target = ready(attention)
    assert [s.argument for s in target.streams] == ["query", "key", "value"] and not any(
        s.heads for s in target.streams
    )
    assert runs(target)[0].dim() == 3


# -- examples -------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Ids, features and a number that must be passed on; the names say nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.attn = nn.Embedding(VOCAB, WIDTH), nn.Linear(9, WIDTH), Attention()

    def forward(self, first, second, factor):
        return self.attn(torch.cat([self.a(first), self.b(second) * factor], 1))[:, : first.shape[1]]


IDS, VECTORS = torch.arange(10).reshape(2, 5), torch.arange(72.0).reshape(2, 4, 9).sin()


@pytest.mark.parametrize(
    "inputs",
    [(IDS, VECTORS, 2.0), [IDS, VECTORS, 2.0], {"first": IDS, "second": VECTORS, "factor": 2.0}],
    ids=["tuple", "list", "dict"],
)  # fmt: skip
def test_examples(inputs):
    target = ready(Two(), inputs=inputs)
    assert [(s.argument, s.kind) for s in target.streams] == [("first", "tokens"), ("second", "features")]
    assert target.stream("first").vocab == VOCAB and target.stream("second").width == 9
    assert target.constants == {"factor": 2.0}


def test_an_example_tensor():
    (stream,) = ready(Features(), inputs=torch.randn(2, 5, 7)).streams
    assert (stream.argument, stream.kind, stream.width) == ("x", "features", 7)
    (stream,) = ready(Learned(), inputs=torch.randint(0, VOCAB, (2, 10))).streams
    assert (stream.kind, stream.length) == ("tokens", 10)


def test_an_example_picture():
    (stream,) = ready(Pictures(), inputs=torch.randn(2, 3, 16, 16)).streams
    assert (stream.kind, stream.width, stream.side) == ("pixels", 3, (16, 16))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (3, "inputs= is a int"),
        ({}, "inputs= is a dict"),
        ({"x": "text"}, "no argument of inputs= holds ids or vectors"),
    ],
)
def test_an_example_that_is_none(inputs, said):
    with pytest.raises(CannotCheck, match=said):
        ready(Features(), inputs=inputs)


# -- what cannot be fed ---------------------------------------------------------------------------------------------


def test_many_arguments_are_named():
    class Four(nn.Module):
        def forward(self, alpha, beta, gamma, delta):
            return alpha

    with pytest.raises(CannotCheck, match=r"Four needs 4 arguments \(alpha, beta, gamma, delta\)"):
        ready(Four())


def test_a_model_that_raises_says_what():
    class Raises(Features):
        def forward(self, sound):
            raise RuntimeError("the carburettor is cold")

    with pytest.raises(CannotCheck) as raised:
        ready(Raises())
    assert "Raises raised on every input tried for sound" in str(raised.value)
    assert "RuntimeError: the carburettor is cold" in str(raised.value) and "inputs=" in str(raised.value)


def test_weights_on_the_meta_device():
    with torch.device("meta"):
        model = Tokens()
    with pytest.raises(CannotCheck, match=r"meta device and hold no numbers \(embed.weight"):
        ready(model)


def test_weights_that_are_nan():
    model = Tokens()
    with torch.no_grad():
        model.attn.out.weight[0, 0] = float("nan")
    with pytest.raises(CannotCheck, match=r"1 of the model's tensors hold NaN, the first is attn.out.weight"):
        ready(model)


def test_a_buffer_of_minus_infinity_is_a_mask():
    model = Tokens()
    model.register_buffer("triangle", torch.full((9, 9), float("-inf")).triu(1))
    assert ready(model).streams


# -- switches -------------------------------------------------------------------------------------------------------


def test_switches_of_a_model():
    class Switched(Features):
        def __init__(self):
            super().__init__()
            self.use_flash = True

        def forward(self, x, need_weights=False, use_cache=False, use_sdpa=True):
            return self.attn(self.first(x))

    switches = {s.name: s for s in ready(Switched()).switches}
    assert set(switches) == {"need_weights=True", "use_cache=True", "use_sdpa=False", "use_flash=False"}
    assert switches["need_weights=True"].looking and switches["use_cache=True"].looking
    assert switches["use_sdpa=False"].backend and switches["use_flash=False"].backend
    model = Switched()
    with switches["use_flash=False"].enter(model):
        assert model.use_flash is False
    assert model.use_flash is True
    with pytest.raises(LookupError), switches["use_flash=False"].enter(model):
        raise LookupError
    assert model.use_flash is True


def test_torch_layers_are_also_tried_with_gradients():
    (switch,) = [s for s in ready(nn.TransformerEncoderLayer(WIDTH, 3, 20, batch_first=True)).switches if s.gradients]
    assert switch.backend and switch.name == "gradients on"


class Reader(nn.Module):
    """Reads a memory where one is given."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reads, self.drop = reads, nn.Dropout(0.5)
        self.own, self.cross = (nn.MultiheadAttention(12, 2, batch_first=True) for _ in range(2))

    def forward(self, x, memory=None, memory_key_padding_mask=None):
        x = x + self.own(x, x, x)[0] + nn.functional.dropout(x, 0.1, training=True)
        if memory is None or not self.reads:
            return x
        return x + self.cross(x, memory, memory, key_padding_mask=memory_key_padding_mask)[0]


@pytest.mark.parametrize(("reads", "found"), [(True, ["x", "memory"]), (False, ["x"])])
def test_an_optional_memory_is_a_stream_where_it_is_read_whatever_is_drawn_at_random(reads, found):
    target = Target(Reader(reads=reads).eval()).ready()
    assert [s.argument for s in target.streams] == found
    assert target.main.argument == "x"
    if reads:
        assert target.stream("memory").padding.argument == "memory_key_padding_mask"


def test_free_lengths_keep_clear_of_fixed_ones() -> None:
    streams = (Stream("wave", "frames", length=7), Stream("before", "tokens"), Stream("after", "tokens"))
    lengths = lengths_for(streams)
    assert lengths["wave"] == 7 and len(set(lengths.values())) == 3
