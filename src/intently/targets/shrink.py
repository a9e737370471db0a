"""A tiny configuration of any transformers model type: every size made small, every relation between sizes kept."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from intently.targets import shrink_roles

Path = tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """The sizes to shrink to. Pairwise different where the models allow it, so that a swapped axis cannot hide."""

    heads: int = 4
    head_width: int = 8
    vocabulary: int = 96
    positions: int = 128
    window: int = 64
    band: int = 5  # so short that sequences of 7 are longer
    experts: int = 4
    image_patches: int = 4
    # Of a model in stages, each with a coarser picture: four that halve it leave something of 64 to the last.
    staged_picture: int = 64
    staged_patches: int = 16
    staged_window: int = 3
    staged_layers: int = 2  # windows are shifted in every other one
    most_layers: int = 8
    layers_of_a_kind: int = 1

    @property
    def width(self) -> int:
        return self.heads * self.head_width


@dataclass(frozen=True)
class Change:
    """One field's new value, and the role that asked for it."""

    value: Any
    role: str


def plan(config: Any, sizes: Sizes = Sizes()) -> dict[Path, Change]:
    """The changes that make `config` (a transformers configuration) tiny, by path: `("text_config", "hidden_size")`.

    Nothing is changed yet, so that a change which does not agree with the model's code can be left out again.

    >>> from transformers import LlamaConfig
    >>> changes = plan(LlamaConfig(num_key_value_heads=8))
    >>> [changes[(name,)].value for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")]
    [32, 4, 2]
    """
    nodes = list(_walk(config))
    known = all(shrink_roles.are_known(shrink_roles.kinds_of(vars(node))) for _, node in nodes)
    if getattr(config, "is_encoder_decoder", False) or not known:
        # Windows of two stacks, and those of layers of unknown kinds, are not read, so none may hide anything.
        sizes = dataclasses.replace(sizes, band=sizes.window)
    widths = {value for _, node in nodes if isinstance(value := _primary(node, shrink_roles.PRIMARY_WIDTHS), int)}
    tokens = _token_map([node for _, node in nodes], sizes)
    changes: dict[Path, Change] = {}
    for path, node in nodes:
        for name, change in _plan_one(node, sizes, widths, tokens).items():
            if change.value != vars(node).get(name):
                changes[(*path, name)] = change
    return changes


def fills(config: Any, changes: Mapping[Path, Change], sizes: Sizes = Sizes()) -> dict[Path, Change]:
    """Values for what a default configuration leaves open although the model's code needs it.

    Some types have no usable default: no head width, no experts per token, no attention layer in a hybrid. Several
    codebooks a step become one, so that plain token ids fit. Only for use after the default has failed, since most open
    fields are open on purpose.
    """
    found: dict[Path, Change] = {}
    for path, node in _walk(config):
        held = vars(node)
        now = {p[-1]: change.value for p, change in changes.items() if p[:-1] == path}
        for name in (field.name for field in dataclasses.fields(node)):
            new = _fill(name, held.get(name), held, now, sizes)
            if new is not None:
                found[(*path, name)] = Change(new, "open")
    return found


def _fill(name: str, value: Any, held: Mapping[str, Any], now: Mapping[str, Any], sizes: Sizes) -> Any:
    count, kinds = now.get("num_hidden_layers", 2), now.get("layer_types", held.get("layer_types"))
    if value is None:
        by_role = {
            "head width": sizes.head_width,
            "heads": sizes.heads,
            "key-value heads": sizes.heads // 2,
            "experts": sizes.experts,
            "chosen experts": 2,
            "shared experts": 1,
            "vocabulary": sizes.vocabulary,
            "window": sizes.window,
            "band": sizes.window,
        }
        by_name = {"pad_token_id": 1, "mask_token_id": 4, "layer_types": ["full_attention"] * count}
        if re.fullmatch(r"attn_layer_(indices|ids|idx)", name):
            return [count - 1]
        if name.startswith("default_") and isinstance(several := held.get(name.removeprefix("default_") + "s"), tuple):
            return several[0]
        return by_name.get(name, by_role.get(shrink_roles.role(name) or ""))
    if name == "layer_types" and isinstance(kinds, list) and not any("full" in k or k == "attention" for k in kinds):
        return [*kinds[:-1], "full_attention"]
    if name == "num_codebooks":
        return 1
    if name == "rope_parameters" and value == {} and isinstance(kinds, list):
        return {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in sorted(set(kinds))}
    if name == "rope_parameters" and "rope_type" in value and "mrope_section" not in value:
        # Models of pictures and text fall back on sections for their full head width.
        half = int(sizes.head_width * value.get("partial_rotary_factor", 1.0)) // 2
        return {**value, "mrope_section": _share([2, 3, 3], half)} if half >= 3 else None
    return None


def part(config: Any, config_class: type) -> Any:
    """The part of a composite configuration that a class made for one part takes, or the whole where it takes that."""
    return next((node for _, node in _walk(config) if isinstance(node, config_class)), config)


def apply(config: Any, changes: Mapping[Path, Change], **settings: Any) -> Any:
    """A new configuration like `config` with `changes` made; `settings` are further fields of the outermost one.

    Fields that the configuration derives from others are left for it to derive anew, so that they agree.
    """
    return _apply(config, changes, (), settings)


def _apply(config: Any, changes: Mapping[Path, Change], path: Path, settings: Mapping[str, Any]) -> Any:
    kind = type(config)
    declared = [field.name for field in dataclasses.fields(kind) if field.init]
    try:
        plain: Any = kind()
    except Exception:  # a configuration that must be given its parts has no plain form: pass everything it holds
        plain = None
    given: dict[str, Any] = {}
    held, usual = vars(config), vars(plain) if plain is not None else {}
    for name in declared:
        value = held.get(name)
        if (*path, name) in changes:
            given[name] = changes[(*path, name)].value
        elif _is_config(value):
            given[name] = _apply(value, changes, (*path, name), {})
        elif plain is None or not _same(value, usual.get(name)):
            given[name] = value
    if (layered := (*path, "per_layer_config")) in changes:
        given["per_layer_config"] = changes[layered].value
    given.update(settings)
    return kind(**given)


def _walk(config: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, config
    for name, value in vars(config).items():
        if _is_config(value):
            yield from _walk(value, (*path, name))


def _is_config(value: Any) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict") and dataclasses.is_dataclass(value)


def _same(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except Exception:
        return False


def derived(config: Any) -> set[str]:
    """The fields of a configuration that it works out itself when they are not given."""
    names = set()
    for field in dataclasses.fields(config):
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is None or default == "auto":
            names.add(field.name)
    return names


def _primary(config: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        value = vars(config).get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _plan_one(config: Any, sizes: Sizes, widths: set[int], tokens: Mapping[int, int]) -> dict[str, Change]:
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    scale = _Scale(config, sizes, widths, tokens)
    underived = derived(config)
    changes: dict[str, Change] = {}
    for name, value in fields.items():
        role = shrink_roles.role(name)
        if role is None or role in ("layers", "layer share", "image"):
            continue
        if name in underived and scale.derivable(role, value):
            continue
        new = _each(value, lambda number, role=role, name=name: scale(role, name, number))
        changes[name] = Change(new, role)
    changes.update(_plan_layers(config, sizes, changes, scale))
    changes.update(_plan_image(config, sizes))
    changes.update(_plan_stages(config, sizes, changes))
    changes.update(_plan_rotary(config, sizes, scale))
    declared = {field.name for field in dataclasses.fields(config)}
    return {name: change for name, change in changes.items() if name in declared or name == "per_layer_config"}


def _each(value: Any, new: Any) -> Any:
    """`new` of a number, or of every number in a list of one value; lists with a value per stage are left alone."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return new(value)
    if isinstance(value, list | tuple) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return type(value)(new(v) for v in value)
    return value


class _Scale:
    """The new value of a number by its role, measured by the configuration's own widths and heads."""

    def __init__(self, config: Any, sizes: Sizes, widths: set[int], tokens: Mapping[int, int]) -> None:
        self.sizes, self.widths, self.tokens = sizes, widths, tokens
        self.width = _primary(config, shrink_roles.PRIMARY_WIDTHS)
        self.heads = _primary(config, shrink_roles.PRIMARY_HEADS)
        fields = vars(config)
        self.fields = fields
        self.given_head_width = _primary(config, shrink_roles.PRIMARY_HEAD_WIDTHS)
        natural = self.width // self.heads if self.width and self.heads else None
        rope = fields.get("qk_rope_head_dim")
        self.latent = isinstance(rope, int) and rope > 0
        self.square = self.given_head_width is None or natural is None or self.given_head_width == natural
        unit = rope if self.latent else self.given_head_width or natural
        goal = sizes.head_width if self.latent or self.square else 2 * sizes.head_width
        self.head_factor = goal / unit if unit else sizes.head_width / 64
        self.expand = next((fields[n] for n in ("expand", "mamba_expand") if isinstance(fields.get(n), int)), None)

    def derivable(self, role: str, value: Any) -> bool:
        """Whether leaving the field out lets the configuration work out the same relation."""
        if role == "head width":
            return self.square and not self.latent and value == self.given_head_width
        if role == "key-value heads":
            return value == self.heads
        return True

    def __call__(self, role: str, name: str, value: int) -> int:
        sizes = self.sizes
        if value <= 0:
            return value
        if role == "token":
            return self.tokens.get(value, value)
        if role == "vocabulary":
            return min(value, sizes.vocabulary)
        if role == "codes":
            return min(value, 64)
        if role == "filters":
            return min(value, 8)
        if role == "positions":
            return min(value, sizes.positions)
        if role == "band" or (role == "window" and "attention_layers" in self.fields):
            return min(value, sizes.band)
        if role == "window":
            return min(value, sizes.window)
        if role == "experts":
            return min(value, sizes.experts)
        if role in ("chosen experts", "shared experts"):
            return min(value, 2)
        if role == "expert groups":
            return 1 if name.startswith("topk") else min(value, 2)
        if role == "heads":
            return self._heads(name, value)
        if role == "key-value heads":
            return self._key_value_heads(value)
        if role == "head width":
            if self.expand and ("mamba" in name or self.heads_are_states):
                return sizes.head_width
            return max(2, 2 * round(value * self.head_factor / 2))
        if role == "rotary width":
            return max(2, 2 * round(value * self.head_factor / 2))
        if role == "state":
            return min(value, 16)
        if role == "state groups":
            return min(value, 2)
        if role == "state heads":
            return self._state_heads(value)
        if role == "rank":
            return min(value, 16)
        return self._width(value)

    @property
    def heads_are_states(self) -> bool:
        return "num_attention_heads" not in self.fields and "conv_kernel" in self.fields

    def _heads(self, name: str, value: int) -> int:
        if self.heads_are_states and self.expand:
            return self._state_heads(value)
        all_heads = [v for n, v in self.fields.items() if isinstance(v, int) and shrink_roles.role(n) == "heads"]
        most = max(all_heads, default=value)
        if value == self.heads or value == most:
            return self.sizes.heads if value > 2 else value
        return min(value, self.sizes.heads // 2) if value < (self.heads or most) else self.sizes.heads

    def _key_value_heads(self, value: int) -> int:
        heads = self.heads or value
        return self.sizes.heads if value >= heads > 2 else min(value, self.sizes.heads // 2)

    def _state_heads(self, value: int) -> int:
        return (self.expand or 1) * self.sizes.width // self.sizes.head_width

    def _width(self, value: int) -> int:
        if value < self.sizes.width // 2:
            return value
        if value in self.widths:
            return self.sizes.width
        if self.heads and self.given_head_width and value == self.heads * self.given_head_width:
            return self._heads("", self.heads) * max(2, 2 * round(self.given_head_width * self.head_factor / 2))
        ratio = value / self.width if self.width else value / 256
        eighths = self.sizes.width * min(max(ratio, 0.5), 2.0) / 8
        return 8 * max(1, round(eighths))


def _token_map(nodes: list[Any], sizes: Sizes) -> dict[int, int]:
    """Special tokens beyond the small vocabulary move to its end, each to a place of its own."""
    seen: set[int] = set()
    for node in nodes:
        for name, value in vars(node).items():
            if shrink_roles.role(name) == "token":
                seen.update(v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, int))
    large = sorted(token for token in seen if token >= 16)
    return {token: max(16, sizes.vocabulary - len(large) + place) for place, token in enumerate(large)}


def _plan_layers(config: Any, sizes: Sizes, others: Mapping[str, Change], scale: _Scale) -> dict[str, Change]:
    """As few layers as still hold every kind of layer, and all lists with one entry a layer cut to match."""
    fields = vars(config)
    changes: dict[str, Change] = {}
    counts = {n: v for n, v in fields.items() if shrink_roles.role(n) == "layers" and type(v) is int and v > 0}
    parts = _parts(counts)
    listed = next((len(v) for n in ("layer_types", "layers_block_type") if isinstance(v := fields.get(n), list)), 0)
    if listed and listed not in counts.values():
        counts[""] = listed  # the configuration counts its layers by this list alone
    main = max(counts.values(), default=0)
    numbers = {n: v for n, v in fields.items() if type(v) is int}
    periods = [v for n, v in numbers.items() if shrink_roles.is_period(n) and 1 < v <= sizes.most_layers]
    periods += [n for n in (_until_every_kind(config),) if n <= sizes.most_layers]
    shares = {n: v for n, v in numbers.items() if shrink_roles.role(n) == "layer share" and 0 < v <= main}
    for name, count in counts.items():
        if name in parts:
            continue
        per_layer, indices = _layer_lists(config, count)
        # A share is the first so many layers, or the last so many where they share what earlier ones computed.
        members = dict(indices)
        if count == main:
            members |= {n: range(count - v, count) if "shared" in n else range(v) for n, v in shares.items()}
        overrides = _overrides(config) if count == main else {}
        kinds_of = {**per_layer, "overrides": [repr(overrides.get(i)) for i in range(count)]}
        kept = _layers_to_keep(count, kinds_of, members, sizes, max(periods, default=0) if count == main else 0)
        if name:
            changes[name] = Change(len(kept), "layers")
        if count == main and parts:
            shrunk = _share([counts[part] for part in parts], max(len(kept), len(parts)))
            changes |= {part: Change(share, "layers") for part, share in zip(parts, shrunk, strict=True)}
        for other, values in per_layer.items():
            values = others[other].value if other in others else values
            changes[other] = Change(type(values)(values[i] for i in kept), "layers")
        for other, values in _runs(config, count).items():
            changes[other] = Change([[[values[i] for i in kept], 1]], "layers")
        if overrides:
            moved = {kept.index(i): _rescale(fields, scale) for i, fields in overrides.items() if i in kept}
            changes["per_layer_config"] = Change(moved, "per layer")
        for other, values in indices.items():
            changes[other] = Change(type(values)(kept.index(i) for i in values if i in kept), "layers")
        for other in members.keys() - indices.keys():
            changes[other] = Change(sum(1 for i in kept if i in members[other]), "layers")
    return changes


def _overrides(config: Any) -> dict[int, dict[str, Any]]:
    """The fields that single layers hold differently from the rest of the configuration."""
    return getattr(vars(config).get("_heterogeneity_spec"), "per_layer_overrides", {})


def _rescale(fields: Mapping[str, Any], scale: _Scale) -> dict[str, Any]:
    roles = {name: shrink_roles.role(name) for name in fields}
    return {n: scale(role, n, v) if (role := roles[n]) and type(v) is int else v for n, v in fields.items()}


def _until_every_kind(config: Any) -> int:
    """After how many layers every kind was there, where the kinds follow from a pattern and are not stored layer by layer."""
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(config, name, None) if name not in vars(config) else None
        if isinstance(kinds, list | tuple) and all(isinstance(k, str) for k in kinds):
            return 1 + max((kinds.index(kind) for kind in set(kinds)), default=0)
    return 1


def _parts(counts: Mapping[str, int]) -> list[str]:
    """The counts of layers that together make up the largest count, where there are such."""
    main = max(counts, key=lambda name: counts[name], default="")
    others = [name for name in counts if name != main]
    return others if len(others) > 1 and sum(counts[name] for name in others) == counts[main] else []


def _layer_lists(config: Any, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    per_layer: dict[str, Any] = {}
    indices: dict[str, Any] = {}
    for name, value in vars(config).items():
        if not isinstance(value, list | tuple) or not value or name[0] == "_" or shrink_roles.role(name) == "token":
            continue
        numbers = all(type(v) is int for v in value)
        rising = numbers and value[0] >= 0 and value[-1] < count and all(a < b for a, b in itertools.pairwise(value))
        if rising and shrink_roles.is_layer_index(name):
            indices[name] = value
        elif len(value) == count and count > 1 and not any(isinstance(v, list | tuple | dict) for v in value):
            per_layer[name] = value
    return per_layer, indices


def _runs(config: Any, count: int) -> dict[str, list[Any]]:
    """Fields that list a value a layer as runs, `[[["global", "local"], 12]]`, written out."""
    found = {}
    for name, value in vars(config).items():
        runs = value if isinstance(value, list | tuple) else ()
        if runs and all(
            isinstance(r, list | tuple) and len(r) == 2 and isinstance(r[0], list | tuple) and type(r[1]) is int
            for r in runs
        ):
            whole = [each for kinds, times in runs for each in [*kinds] * times]
            if len(whole) == count:
                found[name] = whole
    return found


def _layers_to_keep(
    count: int, per_layer: Mapping[str, Any], members: Mapping[str, Any], sizes: Sizes, period: int
) -> list[int]:
    kinds = [
        (tuple(values[i] for values in per_layer.values()), tuple(i in values for values in members.values()))
        for i in range(count)
    ]
    places: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        places.setdefault(kind, []).append(i)
    firsts = sorted(i for found in places.values() for i in found[: sizes.layers_of_a_kind])
    prefix = max(2, firsts[-1] + 1, period)
    if prefix <= sizes.most_layers:
        return list(range(min(prefix, count)))
    # Too many to keep a whole run: one layer of every kind, in order. Rules by layer number then follow the lists.
    return firsts if len(firsts) > 1 else [0, 1]


def _in_stages(fields: Mapping[str, Any]) -> bool:
    """Whether a configuration lists a size for each of several stages."""
    return any(isinstance(fields.get(n), list | tuple) for n in ("depths", "hidden_sizes", "num_heads", "depth"))


def _plan_stages(config: Any, sizes: Sizes, others: Mapping[str, Change]) -> dict[str, Change]:
    """A picture that is made coarser stage by stage: smaller, in smaller windows, with fewer layers to a stage."""
    fields = vars(config)
    if not _in_stages(fields):
        return {}
    changes = {}
    for name in ("depths", "depth"):
        value = others[name].value if name in others else fields.get(name)
        if isinstance(value, list | tuple) and all(type(v) is int for v in value):
            changes[name] = Change(type(value)(min(v, sizes.staged_layers) for v in value), "layers")
    windows = {n: v for n, v in fields.items() if shrink_roles.role(n) == "window" and type(v) is int}
    changes |= {name: Change(min(v, sizes.staged_window), "window") for name, v in windows.items()}
    for name, value in fields.items():
        if shrink_roles.role(name) == "image":
            most = _staged_picture(fields, sizes, max(windows.values(), default=0), value)
            changes[name] = Change(_each(value, lambda size, most=most: min(size, most)), "image")
    changes.update(_plan_folded(fields, changes, sizes))
    changes.update(_plan_last_width(fields, others))
    return changes


def _staged_picture(fields: Mapping[str, Any], sizes: Sizes, window: int, picture: Any) -> int:
    """The side of a picture from which enough is left to the last stage; whole windows, where there are such."""
    patch, depths = fields.get("patch_size"), fields.get("depths")
    if type(patch) is not int:
        return sizes.staged_picture
    if not window or not isinstance(depths, list | tuple):
        return min(sizes.staged_picture, sizes.staged_patches * patch)
    halved = 2 ** (len(depths) - 1)
    first = min(picture) if isinstance(picture, list | tuple) else picture
    across = halved if first >= patch * halved * window else 4  # some keep the picture's size
    return patch * across * min(window, sizes.staged_window)


def _plan_folded(fields: Mapping[str, Any], changes: Mapping[str, Change], sizes: Sizes) -> dict[str, Change]:
    """The bins of a spectrogram that is folded into such a picture, no more often than the last stage can unfold."""
    side, bins = fields.get("spec_size"), fields.get("num_mel_bins")
    if "spec_size" not in changes or type(side) is not int or type(bins) is not int or side % bins:
        return {}
    return {"num_mel_bins": Change(changes["spec_size"].value // min(side // bins, sizes.staged_window), "image")}


def _plan_last_width(fields: Mapping[str, Any], others: Mapping[str, Change]) -> dict[str, Change]:
    """The width of the last stage, where a field states it beside that of the first: doubled from stage to stage."""
    depths = fields.get("depths")
    doubled = 2 ** (len(depths) - 1) if isinstance(depths, list | tuple) else 0
    widths = {n: v for n, v in fields.items() if shrink_roles.role(n) == "width" and type(v) is int and v > 0}
    return {
        last: Change(others[first].value * doubled, "width")
        for first, width in widths.items()
        for last, value in widths.items()
        if value == width * doubled and value != width and first in others
    }


def _plan_image(config: Any, sizes: Sizes) -> dict[str, Change]:
    fields = vars(config)
    if _in_stages(fields):
        return {}
    patch = fields.get("patch_size")
    changes = {}
    for name in ("image_size", "img_size"):
        size = fields.get(name)
        if type(size) is int and type(patch) is int and size % patch == 0 and size > sizes.image_patches * patch:
            changes[name] = Change(sizes.image_patches * patch, "image")
        elif isinstance(size, list | tuple) and isinstance(patch, list | tuple) and len(size) == len(patch):
            changes[name] = Change(type(size)(sizes.image_patches * p for p in patch), "image")
    return changes


def _plan_rotary(config: Any, sizes: Sizes, scale: _Scale) -> dict[str, Change]:
    """Rotary settings made to fit the new head width: sections, per-frequency factors, original lengths."""
    changes = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = vars(config).get(name)
        if isinstance(value, dict):
            changes[name] = Change(_rotary(value, sizes, scale), "rotary")
    return changes


def _rotary(value: dict[str, Any], sizes: Sizes, scale: _Scale) -> dict[str, Any]:
    unit = scale.given_head_width or (scale.width // scale.heads if scale.width and scale.heads else 64)
    half = max(2, 2 * round(unit * scale.head_factor / 2)) // 2
    new = {}
    for key, entry in value.items():
        if isinstance(entry, dict):
            new[key] = _rotary(entry, sizes, scale)
        elif "section" in key and isinstance(entry, list | tuple):
            new[key] = type(entry)(_share(list(entry), max(1, round(sum(entry) * 2 * half / unit))))
        elif key in ("short_factor", "long_factor") and isinstance(entry, list | tuple):
            new[key] = type(entry)(entry[: max(1, round(len(entry) * 2 * half / unit))])
        elif key == "original_max_position_embeddings" and isinstance(entry, int):
            new[key] = min(entry, sizes.positions)
        else:
            new[key] = entry
    return new


def _share(parts: list[int], total: int) -> list[int]:
    """`total` split in the proportions of `parts`, at least 1 each while it lasts.

    >>> _share([16, 24, 24], 4)
    [1, 1, 2]
    """
    shares = [max(1, part * total // sum(parts)) if part else 0 for part in parts]
    place = len(shares) - 1
    while sum(shares) != total and any(shares):
        step = 1 if sum(shares) < total else -1
        if shares[place] + step >= 1:
            shares[place] += step
        elif all(share <= 1 for share in shares):
            break
        place = (place - 1) % len(shares)
    return shares
