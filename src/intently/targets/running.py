"""Runs a target: a private copy in eval mode and a chosen precision, with every forward pass counted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from intently.errors import CannotCheck
from intently.sites import Edit, Settings, Site, Sizes, named_arguments, tracing
from intently.targets.compiled import staying_compiled
from intently.targets.copying import copied
from intently.targets.feeding import Feed, Held, Way, pieces, unremembered
from intently.targets.generating import beside
from intently.targets.program import Program
from intently.targets.row import in_a_row
from intently.targets.signature import dtype_of, lengths_for
from intently.targets.stream import Batch
from intently.targets.target import OutputForm, Switch, Target, call, output_form, tensors_of

PLAIN = Switch("as it is")


@dataclass(frozen=True)
class Fed:
    """What a model gave when it was fed in pieces, with the batch and the sites of each piece."""

    output: Tensor  # [batch, position, values]
    columns: Tensor  # which values of a whole forward these are
    pieces: tuple[Batch, ...]
    sites: tuple[tuple[Site, ...], ...]


class Runner:
    """One target in one precision. The user's model is never touched: a copy runs, unless it cannot be copied.

    `like` is another runner of the target, whose outputs are read in the same way.
    """

    def __init__(self, target: Target, dtype: torch.dtype | None = None, *, like: Runner | None = None):
        self.target = target
        own = dtype_of(target.model)
        self.dtype = dtype or own
        self.forwards = 0
        self.opaque = False  # part of the model ran unseen by tracing
        self.remembers = False  # the model keeps a cache inside itself: each call starts from what it was
        self.model = _prepared(target.model, self.dtype)
        self.watched = self.model.watched if isinstance(self.model, Program) else self.model
        self._forms: dict[str, OutputForm] = like._forms if like is not None else {}

    def fresh(self) -> Runner:
        """The same target in another copy, which has run nothing yet."""
        return Runner(self.target, self.dtype, like=self)

    def output(self, batch: Batch, switch: Switch = PLAIN, *, seed: int = 0) -> Tensor:
        """`[batch, position, values]` in float64 for one call of the untouched model."""
        with self._afresh(), self._context(switch, seed):
            result = call(self.model, {**batch.arguments, **switch.arguments})
        return self._read(result, batch, switch)

    def shapes(self, batch: Batch, switch: Switch = PLAIN) -> list[torch.Size]:
        """The shapes of every floating tensor that one call returns."""
        with self._context(switch, 0):
            return [t.shape for t in tensors_of(call(self.model, {**batch.arguments, **switch.arguments}))]

    def gradients(
        self, batch: Batch, held: Sequence[Tensor], switch: Switch = PLAIN, *, judged: bool = False
    ) -> list[Tensor | None]:
        """Of one number made of all outputs, or of those that are judged, the gradient in each of some tensors; None where
        it has no part."""
        chosen = {part.index for part in self._form_of(switch).parts} if judged else None
        before = [t.requires_grad for t in held]
        generator = torch.Generator().manual_seed(1)
        try:
            for tensor in held:
                tensor.requires_grad_(True)
            with self._context(switch, 0), torch.inference_mode(False), torch.enable_grad():
                found = enumerate(tensors_of(call(self.model, {**batch.arguments, **switch.arguments})))
                made = [t for i, t in found if t.requires_grad and (chosen is None or i in chosen)]
                drawn = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in made]
                total = sum((t.double() * r).sum() for t, r in zip(made, drawn, strict=True))
                if not isinstance(total, Tensor):
                    return [None] * len(held)
                return list(torch.autograd.grad(total, list(held), allow_unused=True))
        finally:
            for tensor, wanted in zip(held, before, strict=True):
                tensor.requires_grad_(wanted)

    def traced(
        self,
        batch: Batch,
        switch: Switch = PLAIN,
        *,
        seed: int = 0,
        edits: Mapping[str, Edit] | None = None,
        keep: bool = True,
    ) -> tuple[Tensor, tuple[Site, ...]]:
        """The output of one traced call, perhaps with edits, and its sites."""
        return self._run_traced(batch, switch, seed, Settings(keep, edits=edits or {}))

    def edited(self, batch: Batch, switch: Switch, *, seed: int = 0, edits: Mapping[str, Edit]) -> Tensor:
        """The output of one call with edits, nothing else being looked at."""
        return self._run_traced(batch, switch, seed, Settings(edited_only=True, edits=edits))[0]

    def _run_traced(
        self, batch: Batch, switch: Switch, seed: int, settings: Settings
    ) -> tuple[Tensor, tuple[Site, ...]]:
        with self._afresh():
            result, sites = self._call_traced(batch, switch, seed, settings)
        return self._read(result, batch, switch), sites

    def _call_traced(self, batch: Batch, switch: Switch, seed: int, settings: Settings) -> tuple[Any, tuple[Site, ...]]:
        arguments = {**batch.arguments, **switch.arguments}
        arguments = self.model.complete(arguments) if isinstance(self.model, Program) else arguments
        named = named_arguments(self.watched, (), arguments)
        lengths = {batch.lengths[s.argument] for s in self.target.streams}
        lengths |= {s.positions(batch.lengths[s.argument]) for s in self.target.streams}
        lengths |= {kept.shape[1] for kept in batch.kept.values()}
        settings.sizes = Sizes(batch.samples, frozenset(lengths))
        with self._context(switch, seed), tracing(self.watched, named, settings) as tracer:
            result = call(self.watched, arguments)
        for tensor in tensors_of(result):
            tracer.known.of(tensor)  # an output that no seen call made is noted, too
        if batch.first is None:  # what a cache holds was made by a call of an earlier piece
            self.opaque = self.opaque or tracer.opaque()
        return result, tracer.sites()

    def fed(
        self,
        batch: Batch,
        feed: Feed,
        switch: Switch = PLAIN,
        *,
        seed: int = 0,
        settings: Callable[[Batch], Settings] | None = None,
    ) -> Fed:
        """The same tokens in pieces through the model's cache; `settings` tells how the call of each piece is traced."""
        read, ran, taken = [], [], []
        with self._afresh(keeps=feed.way.inside):
            held = Held(self.model, batch, feed.way)
            for piece in pieces(self.target, batch, feed, held.given):
                given = dataclasses.replace(piece, arguments={**piece.arguments, **held.arguments()})
                if settings is None:
                    with self._context(switch, seed):
                        result, sites = call(self.model, {**given.arguments, **switch.arguments}), ()
                else:
                    result, sites = self._call_traced(given, switch, seed, settings(piece))
                held.after(result)
                read.append(self._read_piece(result, piece, switch))
                ran.append(piece)
                taken.append(sites)
        columns = min((c for _, c in read), key=len)  # a cache that an output holds fits the first piece alone
        outputs = [values[..., torch.isin(mine, columns)] for values, mine in read]
        return Fed(torch.cat(outputs, 1), columns, tuple(ran), tuple(taken))

    def generated(self, batch: Batch, feed: Feed) -> tuple[Tensor, Tensor]:
        """What the model's own `generate` gives for each new token, and what one forward over them gives."""
        self.forwards += feed.new
        with self._context(PLAIN, 0):
            return beside(self.model, self.target, batch, feed)

    def once(self, way: Way, batch: Batch) -> tuple[Any, Any]:
        """The cache that was passed and what came out, of a first piece that is the whole batch."""
        with self._afresh(), self._context(PLAIN, 0):
            held = Held(self.model, batch, way)
            whole = Feed(way, "", (batch.kept[self.target.main.argument].shape[1],))
            piece = next(pieces(self.target, batch, whole, held.given))
            passed = held.arguments()
            return passed.get(way.cache), call(self.model, {**piece.arguments, **passed})

    def _afresh(self, *, keeps: bool = False) -> contextlib.AbstractContextManager[None]:
        """For a model that keeps a cache inside itself: put it back on exit as it was."""
        return unremembered(self.model) if keeps or self.remembers else contextlib.nullcontext()

    def _read_piece(self, result: Any, piece: Batch, switch: Switch) -> tuple[Tensor, Tensor]:
        """`[batch, position, values]` of a piece, and which values of a whole forward they are: what each position is given."""
        count = piece.lengths[self.target.main.argument]
        found = list(tensors_of(result))
        read, columns, before = [], [], 0
        for part in self._form_of(switch).parts:
            if part.length_axis is not None and part.index < len(found) and found[part.index].dim() > part.length_axis:
                values = part.read(found[part.index])
                if values.shape[:2] == (piece.samples, count) and values.shape[2] == part.width:
                    read.append(values)
                    columns.append(torch.arange(before, before + part.width))
            before += part.width
        if not read:
            raise CannotCheck(f"a piece of {count} positions gives no output of {count} positions")
        return torch.cat(read, -1), torch.cat(columns)

    @property
    def replayed(self) -> bool:
        """Whether what is looked at is another run of the same computation than the one that is judged."""
        return self.watched is not self.model

    @property
    def resolution(self) -> float:
        """The unit of rounding, relative."""
        return self.model.resolution if isinstance(self.model, Program) else float(torch.finfo(self.dtype).eps)

    def shaken(self, batch: Batch, step: float, seed: int) -> Tensor | None:
        """The output with each weight moved by up to `step`, relatively; None where there are no weights to move."""
        if isinstance(self.model, Program):
            moved = self.model.shaken(step, seed)
            if moved is None:
                return None
            self.forwards += 1
            return self._read(moved(**batch.arguments), batch, PLAIN)
        if not isinstance(self.model, nn.Module):
            return None
        kept = [(p, p.detach().clone()) for p in self.model.parameters() if p.is_floating_point()]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter, _ in kept:
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float32).to(parameter) - 0.5
                parameter.mul_(1 + noise * 2 * step)
            try:
                return self.output(batch)
            finally:
                for parameter, value in kept:
                    parameter.copy_(value)

    @contextlib.contextmanager
    def _context(self, switch: Switch, seed: int) -> Iterator[None]:
        self.forwards += 1
        before = torch.get_default_dtype()
        compiling = staying_compiled(self.model)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), compiling, switch.enter(self.model):
            warnings.simplefilter("ignore")
            _seeding()(seed)
            if self.dtype in (torch.float64, torch.float32):
                torch.set_default_dtype(self.dtype)
            try:
                with torch.set_grad_enabled(switch.gradients):
                    yield
            finally:
                torch.set_default_dtype(before)

    def _read(self, result: Any, batch: Batch, switch: Switch) -> Tensor:
        main = self.target.main
        return self._form_of(switch).read(result, main.positions(batch.lengths[main.argument]))

    @property
    def follows_sources(self) -> bool:
        """Whether sources stand in one row with the main stream, in front of it."""
        return self._form_of(PLAIN).parts[0].side == "last"

    def _form_of(self, switch: Switch) -> OutputForm:
        form = self._forms.get(switch.name)
        if form is None:
            form = self._form(switch)
            if switch.name != PLAIN.name:
                if PLAIN.name not in self._forms:
                    self._forms[PLAIN.name] = self._form(PLAIN)
                form = form.like(self._forms[PLAIN.name])
            self._forms[switch.name] = form
        return form

    def _form(self, switch: Switch) -> OutputForm:
        """Found on a batch whose sizes differ from each other."""
        lengths = lengths_for(self.target.streams)
        samples = self.target.samples or 3
        batch = self.target.batch(samples, lengths, dtype=self.dtype)
        main = self.target.main
        with self._context(switch, 0):
            result = call(self.model, {**batch.arguments, **switch.arguments})
            form = output_form(result, samples, main.positions(lengths[main.argument]))
            if form.parts[0].length_axis is not None or len(self.target.streams) == 1:
                return form
            return (
                in_a_row(self.target, batch, result, lambda b: call(self.model, {**b.arguments, **switch.arguments}))
                or form
            )


@functools.cache
def _seeding() -> Callable[[int], Any]:
    """What seeds everything that may draw. Where no accelerator is, torch.manual_seed would note a stack for one at each run."""
    return torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


def _prepared(model: Any, dtype: torch.dtype) -> Any:
    if isinstance(model, Program) and dtype != model.dtype:
        name, own = (str(d).removeprefix("torch.") for d in (dtype, model.dtype))
        raise CannotCheck(f"the file computes in {own}, not in {name}", hint=f"--dtype {own}, or leave it out")
    if not isinstance(model, nn.Module):
        return model
    try:
        mine = copied(model)
    except Exception as error:
        if dtype_of(model) != dtype:
            raise CannotCheck(
                f"{type(model).__name__} cannot be copied, so it cannot be run in {str(dtype).removeprefix('torch.')}",
                cause=f"{type(error).__name__}: {error}",
                hint="--dtype float32, or make its attributes copyable",
            ) from error
        mine = model
    mine.eval()
    if mine is not model:
        mine.cpu()  # inputs are made there, and float64 is at home there
    if dtype_of(mine) != dtype:
        mine.to(dtype)
        for module in mine.modules():
            # Tensors kept as plain attributes (a stored mask, a table of angles) do not follow `to`.
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and value.is_floating_point() and not name.startswith("_"):
                    setattr(module, name, value.to(dtype))
    return mine


def trace_once(target: Target) -> tuple[Site, ...]:
    """The sites of one forward on inputs of the target's own precision."""
    ready = target.ready()
    runner = Runner(ready)
    lengths = lengths_for(ready.streams)
    return runner.traced(ready.batch(ready.samples or 2, lengths, dtype=runner.dtype), keep=False)[1]
