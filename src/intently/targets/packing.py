"""How a model is told which documents are packed into a row: arguments found by name, their form by trying; and the packed target."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Sequence

import torch

from intently.errors import CannotCheck
from intently.targets.lookup_watch import LookupWatch
from intently.targets.signature import dtype_of, form_of_telling, lengths_for, plain_names, signature
from intently.targets.stream import Telling, TellingForm
from intently.targets.target import Target, call


def split(length: int) -> tuple[int, ...]:
    """The document of each position: three documents where there is room for them, else two."""
    first, last = max(2, length // 3 - 1), length // 3
    sizes = (first, length - first - last, last) if length >= 6 else (length // 2, length - length // 2)
    return tuple(number for number, size in enumerate(sizes) for _ in range(size))


def needed_tellings(target: Target) -> tuple[Telling, ...]:
    """Arguments about documents that the model cannot do without, by their names alone."""
    parameters = signature(target.model)
    names = plain_names(parameters)
    tellings = [Telling(name, form, optional=False) for name in names if (form := form_of_telling(name)) is not None]
    if len(tellings) == len(names):
        return ()  # nothing else carries content
    return tuple(t for t in tellings if parameters[t.argument].default is inspect.Parameter.empty)


def with_tellings(target: Target) -> Target:
    """The target with the arguments that tell it of documents, each in a form that it takes."""
    if len({s.follows or s.argument for s in target.streams}) > 1 or target.main.kind not in ("tokens", "features"):
        return target
    parameters = signature(target.model)
    given = {*target.constants, *(s.argument for s in target.streams)}
    given |= {s.padding.argument for s in target.streams if s.padding is not None}
    found = list(target.tellings)
    given |= {t.argument for t in found}
    for name in plain_names(parameters):
        form = form_of_telling(name)
        if form is not None and name not in given:
            found += _fitted(target, found, name, form)
    return dataclasses.replace(target, tellings=tuple(found))


def _fitted(target: Target, found: Sequence[Telling], name: str, form: TellingForm) -> list[Telling]:
    """The argument in the first form in which the model runs; none where there is no such form."""
    length = lengths_for(target.streams)[target.main.argument]
    for rank in (2, 1) if form != "bounds" else (2,):
        telling = Telling(name, form, rank)
        trial = packed(dataclasses.replace(target, tellings=(*found, telling)), split(length))
        batch = trial.batch(2, lengths_for(trial.streams), dtype=dtype_of(trial.model))
        watch = LookupWatch(batch.arguments[name].reshape(-1))
        try:
            with torch.no_grad(), warnings.catch_warnings(), watch:
                warnings.simplefilter("ignore")
                call(trial.model, batch.arguments)
        except Exception:
            continue
        return [dataclasses.replace(telling, content=bool(watch.rows))]
    return []


def packed(target: Target, documents: Sequence[int]) -> Target:
    """The target with these documents in every row, and so of one length; without a cache, which ends packing in some models."""
    clashing = [s for s in target.streams if s.length not in (None, len(documents))]
    if clashing:
        raise CannotCheck(
            f"the intent speaks of documents of {len(documents)} positions together, and {clashing[0].argument} has "
            f"{clashing[0].length}",
            hint="give documents whose lengths add up to that, or --length",
        )
    streams = tuple(dataclasses.replace(s, length=len(documents)) for s in target.streams)
    cacheless = {"use_cache": False} if "use_cache" in signature(target.model) else {}
    return dataclasses.replace(
        target, streams=streams, documents=tuple(documents), constants={**target.constants, **cacheless}
    )


def as_stated(target: Target) -> Target:
    """A target whose intent names documents, with these packed into every row; any other as it is."""
    numbers = stated_documents(target)
    return target if numbers is None or target.documents else packed(target, numbers)


def stated_documents(target: Target) -> tuple[int, ...] | None:
    """The document of each position, where the target's own intent names documents."""
    mask = target.intent.mask if target.intent is not None else None
    return mask.document_numbers if mask is not None else None


def stated_length(target: Target) -> int | None:
    """How many positions the documents of the target's own intent have together."""
    numbers = stated_documents(target)
    return len(numbers) if numbers is not None else None
