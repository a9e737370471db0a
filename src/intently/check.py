"""Check: promises × conditions from outside, then the sites, then names for what is broken, then proof by repair."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from intently import __version__
from intently._verbs import callable_module
from intently.edits import apply_all
from intently.errors import CannotCheck
from intently.faults import FAULTS, Examination, Suspicion
from intently.intent import Intent
from intently.masks import recognise
from intently.promises import PROMISES, Condition, Trial, conditions_of, difference
from intently.report import Cell, Finding, Report, SiteRecord, Witness
from intently.sites import Site
from intently.targets.discover import dtype_of, lengths_for
from intently.targets.running import PLAIN, Runner
from intently.targets.stream import Batch
from intently.targets.target import Target

Progress = Callable[[str, int, int], None]

# A float64 copy of a model with more parameters than this may not fit beside the model itself.
MOST_PARAMETERS_IN_DOUBLE = 700_000_000
SMALL = 5_000_000  # parameters
_ORDER = {"error": 0, "warning": 1, "note": 2}


def check(
    target: Any,
    *,
    intent: Intent | None = None,
    inputs: Any = None,
    padding: str | None = None,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    dtype: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Try what an intent promises on a model, and name, locate and prove the faults that break it.

    Args:
        target: a `Target`, a module, or a function of q, k and v. The model itself is not changed: a copy runs.
        intent: what the attention is meant to do; left out, what the target says, else what is observed.
        inputs: an example call (tensor, tuple or dict) where the inputs cannot be found by trying.
        padding: the argument that carries the key mask, `"name"`, `"name:keep"` or `"name:hide"`.
        select, ignore: names of promises or faults to try, or to leave out.
        dtype: `"auto"` (float64 where the model runs in it), or a floating type's name.
        seed: seed of the inputs.
        progress: called with a phase in words, how many runs are done, and about how many there will be.

    Returns:
        A `Report`: verdict, grid of promise × condition, findings, sites.

    Raises:
        CannotCheck: no verdict is possible; the message says why and what to try.

    >>> import torch, intently
    >>> from intently import Intent, Mask
    >>> def attention(q, k, v):
    ...     return (q @ k.mT).softmax(-1) @ v
    >>> report = intently.check(attention, intent=Intent(Mask.full()))
    >>> [(f.fault, f.proof) for f in report.findings]
    [('scale-missing', 'proven')]
    """
    started = time.perf_counter()
    whole = target if isinstance(target, Target) else Target(target)
    given = {k: v for k, v in {"intent": intent, "inputs": inputs, "padding": padding}.items() if v is not None}
    whole = replace(whole, **given)
    with torch.random.fork_rng(devices=[]), _threads_for(whole.model):
        torch.manual_seed(seed)
        return _Checking(whole.ready(), select, ignore, dtype, seed, progress, started).report()


@contextlib.contextmanager
def _threads_for(model: Any) -> Iterator[None]:
    """One thread for a small model: its operations are too short to be shared, and waiting threads cost more than they do."""
    before = torch.get_num_threads()
    size = sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0
    if size < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Checking:
    """One check, phase by phase."""

    def __init__(
        self,
        target: Target,
        select: Sequence[str] | None,
        ignore: Sequence[str] | None,
        dtype: str,
        seed: int,
        progress: Progress | None,
        started: float,
    ):
        self.target = target
        self.select, self.ignore = select, ignore
        self.seed, self.progress, self.started = seed, progress, started
        self.notes: list[str] = list(target.notes)
        self.phase, self.done, self.total = "trying promises", 0, 1
        self.runner, self.others = self._runners(dtype)
        self.lengths = self._lengths()

    # -- precision and sizes ----------------------------------------------------------------------------------------

    def _runners(self, dtype: str) -> tuple[Runner, dict[str, Runner]]:
        own = dtype_of(self.target.model)
        if dtype != "auto":
            return Runner(self.target, getattr(torch, dtype)), {}
        size = sum(p.numel() for p in self.target.model.parameters()) if isinstance(self.target.model, nn.Module) else 0
        others: dict[str, Runner] = {}
        plain = Runner(self.target, own if own in (torch.float32, torch.float64) else torch.float32)
        self._must_run(plain)
        if size > MOST_PARAMETERS_IN_DOUBLE:
            self.notes.append(
                f"{size / 1e6:.0f}M parameters: checked in {_short(plain.dtype)} against its own noise floor, not in float64"
            )
            return plain, others
        double = Runner(self.target, torch.float64)
        error = self._fails(double)
        if error is not None:
            self.notes.append(f"the model does not run in float64 ({error}); checked in {_short(plain.dtype)}")
            return plain, others
        if isinstance(self.target.model, nn.Module):
            others[_short(plain.dtype)] = plain
            if size < 50_000_000:
                for half in (torch.bfloat16, torch.float16):
                    runner = Runner(self.target, half)
                    if self._fails(runner) is None:
                        others[_short(half)] = runner
        return double, others

    def _must_run(self, runner: Runner) -> None:
        error = self._fails(runner)
        if error is not None:
            raise CannotCheck(
                f"{self.target.label} raised on the inputs made for it",
                cause=error,
                hint="give inputs= an example call",
            )

    def _fails(self, runner: Runner) -> str | None:
        try:
            runner.output(self.target.batch(2, lengths_for(self.target.streams), dtype=runner.dtype))
        except CannotCheck:
            raise
        except Exception as error:
            said = str(error).splitlines()[0][:200] if str(error) else ""
            return f"{type(error).__name__}: {said}".rstrip(": ")
        return None

    def _lengths(self) -> dict[str, int]:
        """Lengths that differ from each other and from the numbers of heads and widths of the model."""
        lengths = lengths_for(self.target.streams)
        _, sites = self.runner.traced(self.target.batch(2, lengths, dtype=self.runner.dtype), keep=False)
        taken = {n for s in sites for n in (s.heads, s.kv_heads, s.head_dim, s.value_dim)}
        self.samples = next(n for n in (2, 3, 5, 4, 7) if n not in taken)
        short = [s for s in self.target.streams if (s.length or lengths[s.argument]) < 2]
        if short:
            raise CannotCheck(
                f"the input {short[0].argument} is {short[0].length} position long",
                cause="with one position there is nothing to see or to hide",
                hint="--length 7, or an example with at least two positions",
            )
        for base in (7, 6, 9, 10, 5, 11):
            chosen = lengths_for(self.target.streams, base)
            free = [n for a, n in chosen.items() if self.target.stream(a).length is None]
            if not set(free) & (taken | {self.samples}) and self._runs_at(chosen):
                return chosen
        return lengths

    def _runs_at(self, lengths: Mapping[str, int]) -> bool:
        try:
            self.runner.output(self.target.batch(self.samples, lengths, dtype=self.runner.dtype))
        except Exception:
            return False
        return True

    def _noise(self) -> float:
        """Rounding of this model, relative to its largest output: how far a change of its weights by some ulps moves it."""
        eps = float(torch.finfo(self.runner.dtype).eps)
        batch = self.target.batch(self.samples, self.lengths, seed=self.seed, dtype=self.runner.dtype)
        base = self.runner.output(batch)
        model = self.runner.model
        least = 64 * eps
        finite = base[torch.isfinite(base)]
        if not isinstance(model, nn.Module) or not finite.numel() or not float(finite.abs().amax()):
            return least
        kept = [(p, p.detach().clone()) for p in model.parameters() if p.is_floating_point()]
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter, _ in kept:
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float32).to(parameter) - 0.5
                parameter.mul_(1 + noise * 8 * eps)
            try:
                moved = self.runner.output(batch)
            finally:
                for parameter, value in kept:
                    parameter.copy_(value)
        gap = torch.nan_to_num(difference(moved, base), posinf=0.0)
        # A router that flips at a tie moves far more than rounding does; the floor is not raised to hide that much.
        return min(max(least, 8 * float(gap.amax()) / float(finite.abs().amax())), 1e5 * eps)

    # -- the phases -------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        conditions = self._usable(conditions_of(self.target, self.samples))
        self._plan(conditions)
        self.trial = Trial(
            self.target, self.target.intent or Intent(), self.runner, conditions, self.lengths, floor=self._noise(), seed=self.seed,
            progress=self._tick,
        )  # fmt: skip
        self.trial.in_precision = self.others
        self._settle_precision()
        self._refuse_dead()
        plain = self._first_sites()
        intent = self._intent(plain)
        self.trial.intent = intent
        cells = self._grid()
        self.phase = "looking at the sites"
        suspicions = self._suspects(cells)
        self.phase = "proving"
        findings = self._findings(cells, suspicions)
        findings += self._odd_ones_out(intent, plain)
        return self._finish(intent, cells, findings, plain)

    def _usable(self, conditions: Sequence[Condition]) -> list[Condition]:
        """Conditions under which the model runs at all; the others are told in a note."""
        usable, refused = [], []
        for condition in conditions:
            probe = Trial(self.target, Intent(), self.runner, [condition], self.lengths, seed=self.seed)
            try:
                probe.output(condition)
            except Exception as error:
                refused.append((condition, error))
            else:
                usable.append(condition)
        if not any(c.switch.name == PLAIN.name for c in usable):
            condition, error = refused[0]
            raise CannotCheck(
                f"{self.target.label} raised under every condition, first under {condition.name!r}",
                cause=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                hint="give inputs= an example call",
            )
        for condition, error in refused:
            said = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
            self.notes.append(f"not tried: {condition.name} ({said})")
        return usable

    def _plan(self, conditions: Sequence[Condition]) -> None:
        positions = sum(min(12, s.positions(self.lengths[s.argument])) for s in self.target.streams)
        plain = [c for c in conditions if c.switch.name == PLAIN.name]
        self.total = (
            len(plain) * (positions + 3) + (len(conditions) - len(plain)) * 2 + len(conditions) * len(self.others)
        )

    def _tick(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.phase, min(self.done, self.total), self.total)

    def _settle_precision(self) -> None:
        """A model that float64 alone turns into NaN is checked in the precision it is deployed in; the fault is told all the same."""
        self.double_only: list[tuple[Condition, Trial]] = []
        deployed = next((r for n, r in self.others.items() if n == "float32"), None)
        if self.runner.dtype != torch.float64 or deployed is None:
            return
        ill = [c for c in self.trial.conditions if not c.switch.looking and self._ill(self.trial, c)]
        if not ill:
            return
        other = Trial(
            self.target,
            self.trial.intent,
            deployed,
            self.trial.conditions,
            self.lengths,
            seed=self.seed,
            progress=self._tick,
        )
        if any(self._ill(other, c) for c in ill):
            return
        self.double_only = [(c, self.trial) for c in ill]
        self.notes.append(
            f"float64 alone gives outputs that are not finite ({', '.join(c.name for c in ill[:3])}); the promises are tried in float32"
        )
        del self.others["float32"]
        self.runner = deployed
        other.floor = self._noise()
        other.in_precision = {"float64": self.trial.runner, **self.others}
        self.trial = other

    @staticmethod
    def _ill(trial: Trial, condition: Condition) -> bool:
        output = trial.output(condition)
        return not bool(torch.isfinite(output[trial.real_rows(condition, output.shape[1])]).all())

    def _refuse_dead(self) -> None:
        """A model whose output no input moves cannot be judged: every mask would pass."""
        condition = self.trial.conditions[0]
        if self._ill(self.trial, condition):
            return
        influence = self.trial.influence(condition)
        if all(float(m.amax()) == 0 for m in influence.moved.values()):
            raise CannotCheck(
                f"no change of any input moves the output of {self.target.label}",
                cause="its output does not depend on its inputs (zero-initialised output projection, or the wrong argument is changed)",
                hint="load trained weights, redraw the zeros, or give inputs= an example call",
            )

    def _first_sites(self) -> tuple[Site, ...]:
        plain = [c for c in self.trial.conditions if c.switch.name == PLAIN.name]
        wide = next((c for c in plain if c.layout.samples > 1), plain[0])
        sites = self.trial.sites(wide)
        if not sites:
            raise CannotCheck(
                f"no attention call was seen while {self.target.label} ran",
                cause="no product of queries and keys meets a softmax and then values, and no fused attention kernel ran",
                hint="check a part of the model that attends, or a forward that is plain PyTorch (not scripted, not a custom kernel)",
            )
        return sites

    def _intent(self, sites: Sequence[Site]) -> Intent:
        """The stated intent, or the mask that most self-attention calls of the main stream are observed to use."""
        stated = self.target.intent
        if stated is not None and stated.mask is not None:
            return stated
        base = stated or Intent()
        main = self.target.main
        length = main.positions(self.lengths[main.argument])
        votes: dict[str, list[Site]] = {}
        for site in sites:
            ours = site.queries == length and (
                main.argument in site.origins.get("query", frozenset()) or len(self.target.streams) == 1
            )
            if site.role == "self" and site.visible is not None and ours and site.rows.are_tokens:
                kind = recognise(site.visible)
                if kind.exact and kind.mask is not None:
                    votes.setdefault(str(kind.mask), []).append(site)
        self.votes = votes
        if not votes:
            return replace(base, origin="observed")
        phrase, winners = max(votes.items(), key=lambda item: len(item[1]))
        mask = recognise(winners[0].visible).mask if winners[0].visible is not None else None
        if len(votes) > 1 and len(winners) * 2 <= sum(map(len, votes.values())):
            return replace(base, origin="observed")  # no majority: nothing is claimed
        return replace(base, mask=mask, origin="observed")

    def _grid(self) -> list[Cell]:
        cells: list[Cell] = []
        for promise in PROMISES.values():
            if promise.name in self.trial.intent.waived:
                reason = self.trial.intent.waived[promise.name]
                cells += [
                    Cell(promise.name, c.name, "not-applicable", note=f"waived: {reason}")
                    for c in self.trial.conditions
                ]
                continue
            if not self._asked(promise.name):
                cells += [Cell(promise.name, c.name, "not-tried", note="not selected") for c in self.trial.conditions]
                continue
            self.phase = f"trying {promise.name}"
            cells += promise.try_on(self.trial)
        return cells

    def _asked(self, promise: str) -> bool:
        """Whether a promise is wanted by name, or by the name of a fault that breaks it."""

        def named(names: Sequence[str]) -> bool:
            return promise in names or any(promise in FAULTS[n].promises for n in names if n in FAULTS)

        if self.select is not None and not named(self.select):
            return False
        return self.ignore is None or promise not in self.ignore

    def _suspects(self, cells: Sequence[Cell]) -> list[Suspicion]:
        seen = Examination(self.trial, tuple(cells))
        found: dict[tuple[str, str], Suspicion] = {}
        for name, fault in FAULTS.items():
            if name == "side-channel" or not self._fault_asked(name):
                continue
            for suspicion in fault.look(seen):
                place = suspicion.site.key_name if suspicion.site is not None else suspicion.place
                key = (name, place)
                if key not in found or self._shows_better(suspicion, found[key], cells):
                    found[key] = suspicion
        return self._without_shadows(list(found.values()))

    def _fault_asked(self, name: str) -> bool:
        if self.ignore is not None and name in self.ignore:
            return False
        return self.select is None or name in self.select or any(p in self.select for p in FAULTS[name].promises)

    @staticmethod
    def _shows_better(new: Suspicion, old: Suspicion, cells: Sequence[Cell]) -> bool:
        """Of two looks at one fault, the one under a condition that breaks its promise."""

        def broken(s: Suspicion) -> bool:
            return any(c.promise == s.promise and c.condition == s.condition and c.verdict == "broken" for c in cells)

        return broken(new) and not broken(old)

    @staticmethod
    def _without_shadows(found: list[Suspicion]) -> list[Suspicion]:
        """One cause, one name: an inverted mask also leaks and also hides, a wrong axis also breaks the sums."""
        stronger = {
            "mask-inverted": ("padding-leak", "mask-ignored", "causal-leak", "causal-extra"),
            "mask-ignored": ("padding-leak", "causal-leak"),
            "heads-interleaved": ("causal-leak", "causal-extra", "padding-leak", "mask-ignored"),
            "softmax-wrong-axis": ("mask-ignored",),
        }
        names = {(s.fault.name, s.site.key_name) for s in found if s.site is not None}
        return [
            s
            for s in found
            if s.site is None
            or not any((strong, s.site.key_name) in names and s.fault.name in weak for strong, weak in stronger.items())
        ]

    # -- proof ------------------------------------------------------------------------------------------------------

    def _findings(self, cells: Sequence[Cell], suspicions: list[Suspicion]) -> list[Finding]:
        findings = [self._finding(s, *self._prove(s, suspicions)) for s in suspicions]
        findings += self._double_only()
        if self._fault_asked("side-channel"):
            findings += self._side_channels(cells, suspicions)
        return findings

    def _edits(self, suspicions: Sequence[Suspicion]) -> dict[str, Any]:
        by_site: dict[str, list[Any]] = {}
        for s in suspicions:
            if s.repair is not None and s.site is not None:
                by_site.setdefault(s.site.key_name, []).append(s.repair)

        def joined(repairs: list[Any]) -> Callable[[Site, Batch], Any]:
            return lambda site, batch: apply_all([lambda s, r=r: r(s, batch) for r in repairs])(site)

        return {key: joined(repairs) for key, repairs in by_site.items()}

    def _prove(self, suspicion: Suspicion, everyone: Sequence[Suspicion]) -> tuple[bool, str]:
        """Kept with every suspect repaired, and broken again with all but this one: it is this site."""
        if suspicion.proven_by:
            return True, suspicion.proven_by
        if suspicion.repair is None or suspicion.site is None:
            return False, suspicion.unprovable or "no repair of one site can take this fault away"
        condition = self.trial.named(suspicion.condition)
        allies = [s for s in everyone if s.site is not None and s.repair is not None]
        # Another name for the same call would repair it too: what counts is this repair beside those of other calls.
        alone = [s for s in allies if s.site is not None and s.site.key_name != suspicion.site.key_name]
        everything = self._verdict(suspicion.promise, condition, [*alone, suspicion])
        if everything != "kept":
            alone = [s for s in allies if s is not suspicion]
            everything = self._verdict(suspicion.promise, condition, allies)
        what = f"repaired at this call, {suspicion.promise} is kept ({condition.name})"
        if everything == "kept":
            if not alone:
                return True, what
            without = self._verdict(suspicion.promise, condition, alone)
            if without == "broken":
                return True, what if len(
                    allies
                ) == 1 else f"{what}, and broken again when all other suspects are repaired but not this one"
            if self._verdict(suspicion.promise, condition, [suspicion]) == "kept":
                return True, what
            if suspicion.promise == "finite" and self._heals(suspicion, condition, alone):
                return (
                    True,
                    f"repaired, this call's output is finite ({condition.name}); left alone it is not, though only pads suffer from it",
                )
            return False, "the promise is kept with or without this repair: other repairs are enough"
        if alone and self._verdict(suspicion.promise, condition, [suspicion]) == "kept":
            return True, what
        return False, f"{suspicion.promise} stays {everything} after the repair ({condition.name})"

    def _heals(self, suspicion: Suspicion, condition: Condition, others: Sequence[Suspicion]) -> bool:
        """Whether the call itself is finite with its repair and not without it, everything else being repaired."""

        def finite(suspicions: Sequence[Suspicion]) -> bool:
            sites = self.trial.repaired(self._edits(suspicions), [condition]).sites(condition)
            mine = [
                s
                for s in sites
                if suspicion.site is not None and s.key_name == suspicion.site.key_name and s.tensors is not None
            ]
            return bool(mine) and all(
                bool(torch.isfinite(s.tensors.output).all()) for s in mine if s.tensors is not None
            )

        return finite([*others, suspicion]) and not finite(others)

    def _verdict(self, promise: str, condition: Condition, suspicions: Sequence[Suspicion]) -> str:
        key = (promise, condition.name, tuple(sorted((s.fault.name, s.site.key_name) for s in suspicions if s.site)))
        memo = self.__dict__.setdefault("_verdicts", {})
        if key not in memo:
            conditions = [condition]
            plain = Condition(PLAIN, condition.layout)
            repaired = self.trial.repaired(self._edits(suspicions), [condition])
            if condition.switch.looking and promise == "observer-neutral":
                repaired = self.trial.repaired(self._edits(suspicions), conditions)
                repaired._outputs[(plain.name, 0)] = self.trial.output(plain)
            try:
                found = [c for c in PROMISES[promise].try_on(repaired) if c.condition == condition.name]
            except CannotCheck:
                found = []
            verdicts = {c.verdict for c in found}
            memo[key] = "broken" if "broken" in verdicts else "kept" if "kept" in verdicts else "untried"
        return memo[key]

    def _finding(self, suspicion: Suspicion, proven: bool, note: str) -> Finding:
        site = suspicion.site
        stage = suspicion.fault.stage
        source = None
        if site is not None:
            line = {
                "scale": "scale",
                "mask": "mask",
                "normalize": "normalize",
                "project": "score",
                "aggregate": "aggregate",
            }.get(stage, "normalize")
            line = "dropout" if suspicion.fault.name == "dropout-in-eval" else line
            source = site.line(line)
        return Finding(
            fault=suspicion.fault.name,
            promise=suspicion.promise,
            stage=stage,
            severity=suspicion.severity or suspicion.fault.severity,
            site=site.path if site is not None else suspicion.place or "(root)",
            heads=suspicion.heads,
            source=source,
            message=suspicion.message,
            witness=suspicion.witness,
            proof="proven" if proven else "suspected",
            proof_note=note,
            fix=suspicion.fault.fix,
            condition=suspicion.condition,
        )

    def _double_only(self) -> list[Finding]:
        """NaN in float64 alone, located and proven there."""
        if not self.double_only or not self._fault_asked("not-finite"):
            return []
        trial = self.double_only[0][1]
        conditions = [c for c, _ in self.double_only]
        cells = [Cell("finite", c.name, "broken", 1.0, 0.0) for c in conditions]
        seen = Examination(trial, tuple(cells))
        found: dict[str, Suspicion] = {}
        for suspicion in FAULTS["not-finite"].look(seen):
            found.setdefault(suspicion.site.key_name if suspicion.site else "", replace(suspicion, severity="warning"))
        mine = self.trial
        self.trial = trial
        try:
            suspicions = list(found.values())
            return [self._finding(s, *self._prove(s, suspicions)) for s in suspicions]
        finally:
            self.trial = mine

    def _side_channels(self, cells: Sequence[Cell], suspicions: Sequence[Suspicion]) -> list[Finding]:
        """What stays broken when every suspect call is repaired is carried by something else."""
        promises = FAULTS["side-channel"].promises
        broken = [c for c in cells if c.verdict == "broken" and c.promise in promises]
        left = []
        for cell in broken:
            condition = next((c for c in self.trial.conditions if c.name == cell.condition), None)
            if condition is None:
                continue
            concerned = [s for s in suspicions if s.repair is not None and s.site is not None]
            if not concerned or self._verdict(cell.promise, condition, concerned) == "broken":
                left.append(cell)
        if not left:
            return []
        trial = self.trial.repaired(self._edits(suspicions), self.trial.conditions) if suspicions else self.trial
        seen = Examination(trial, tuple(left))
        found: dict[tuple[str, str], Suspicion] = {}
        for suspicion in FAULTS["side-channel"].look(seen):
            if suspicion.place or not suspicions:
                found.setdefault((suspicion.promise, suspicion.place), suspicion)
        return [self._finding(s, bool(s.proven_by), s.proven_by or s.unprovable) for s in found.values()]

    def _odd_ones_out(self, intent: Intent, sites: Sequence[Site]) -> list[Finding]:
        return []

    # -- the report -------------------------------------------------------------------------------------------------

    def _finish(self, intent: Intent, cells: list[Cell], findings: list[Finding], sites: Sequence[Site]) -> Report:
        findings.sort(key=lambda f: (_ORDER[f.severity], f.site))
        errors = [f for f in findings if f.severity == "error"]
        self._explain_unexplained(cells, findings)
        for stream in self.target.streams:
            if stream.padding is not None and stream.padding.observed:
                meaning = "keeps" if stream.padding.keep else "hides"
                self.notes.append(
                    f"{stream.padding.argument}: a true entry {meaning} a key (observed; say --padding {stream.padding.argument}:keep or :hide)"
                )
        if not any(s.padding for s in self.target.streams):
            self.notes.append("the model takes no key mask: it has no way to ignore pads")
        runners = [self.runner, *self.others.values(), *(t.runner for _, t in self.double_only[:1])]
        forwards = sum(r.forwards for r in {id(r): r for r in runners}.values())
        records: list[SiteRecord] = [s.record() for s in sites]
        words = f"{intent} ({intent.origin})" if intent.mask is not None or intent.origin != "stated" else str(intent)
        return Report(
            target=self.target.label,
            verdict="broken" if errors or self.unexplained else "kept",
            intent=words,
            grid=tuple(cells),
            findings=tuple(findings),
            sites=tuple(records),
            environment={
                "intently": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "dtype": _short(self.runner.dtype),
                **_optional_versions(),
            },
            forwards=forwards,
            seconds=round(time.perf_counter() - self.started, 3),
            notes=tuple(self.notes),
        )

    def _explain_unexplained(self, cells: Sequence[Cell], findings: Sequence[Finding]) -> None:
        """A broken promise that no finding explains must not pass in silence."""
        explained = {p for f in findings for p in (f.promise, *FAULTS[f.fault].promises)}
        broken = {c.promise for c in cells if c.verdict == "broken"}
        self.unexplained = False
        for promise in sorted(broken - explained):
            first = next(c for c in cells if c.promise == promise and c.verdict == "broken")
            self.notes.append(f"{promise} is broken under {first.condition!r}, and no fault known here explains it")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _optional_versions() -> dict[str, str]:
    import sys

    module = sys.modules.get("transformers")
    return {"transformers": str(getattr(module, "__version__", "?"))} if module is not None else {}


__all__ = ["Witness", "check"]

callable_module(__name__, "check")
