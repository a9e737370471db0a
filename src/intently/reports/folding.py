"""Paths of repeated layers folded into one: `layers.0.attn`, `layers.1.attn` become `layers.0–1.attn`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


def fold(paths: Iterable[tuple[str, Hashable]]) -> list[tuple[str, int, int]]:
    """Fold paths that differ in one number and are described alike.

    Each entry is a path and its description. Returned are the folded path, how many paths it stands for, and the
    index of the first of them, in the order of first appearance.

    >>> fold([("layers.0.attn", "causal"), ("layers.1.attn", "causal"), ("head", "causal")])
    [('layers.0–1.attn', 2, 0), ('head', 1, 2)]
    """
    entries = list(paths)
    depth = max((len(_numbers(path)) for path, _ in entries), default=0)
    # Which number counts the layers is not known: take the one that folds most.
    return min((_fold_at(entries, position) for position in range(max(depth, 1))), key=len)


def _numbers(path: str) -> list[int]:
    """Places of the dot-separated parts that are numbers."""
    return [place for place, part in enumerate(path.split(".")) if part.isdecimal()]


def _fold_at(entries: Sequence[tuple[str, Hashable]], position: int) -> list[tuple[str, int, int]]:
    groups: dict[Hashable, list[tuple[int, int | None]]] = {}
    for index, (path, described) in enumerate(entries):
        parts, places = path.split("."), _numbers(path)
        number = None
        if position < len(places):
            number = int(parts[places[position]])
            parts[places[position]] = "{}"
        groups.setdefault((".".join(parts), described), []).append((index, number))

    folded = []
    for (template, _), members in groups.items():  # type: ignore[misc]
        numbers = sorted({number for _, number in members if number is not None})
        path = template.replace("{}", _ranges(numbers), 1) if numbers else template
        folded.append((path, len(members), members[0][0]))
    return folded


def _ranges(numbers: Sequence[int]) -> str:
    """`0–3,5` for 0 1 2 3 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
