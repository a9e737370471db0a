"""One check, phase by phase: promises from outside, sites, names, proof, report."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

import torch

from intently import __version__
from intently.check.elsewhere import carried_elsewhere
from intently.check.naming import Selection, suspects
from intently.check.observe import narrowest, observed, odd_one_out
from intently.check.precision import MOST_PARAMETERS_IN_HALF, Setup, noise_floor, parameters, set_up, short
from intently.check.proof import Prover
from intently.errors import CannotCheck
from intently.faults import FAULTS, Examination, Suspicion, documents_leak
from intently.intent import Intent
from intently.masks import Mask
from intently.promises import PROMISES, Condition, Trial, conditions_of, documents_isolated, equal_case, feeds_of
from intently.promises.cells import narrow
from intently.promises.windowed import bites, telling_length
from intently.report import Cell, Finding, Report, Severity, Verdict
from intently.sites import Site
from intently.targets.packing import as_stated, packed, split
from intently.targets.running import PLAIN, Runner
from intently.targets.signature import lengths_for
from intently.targets.target import Target
from intently.targets.ways import ways_of

Progress = Callable[[str, int, int], None]
LONG = (48, 36)  # positions; tables of positions often hold 64
MOST_FOR_A_WINDOW = 192  # positions tried at most to go beyond what the windows of all layers reach
_LONG = "long"
MOST_HEADS = 8  # for a batch of as many samples
MOST_TO_CURE = 2  # conditions of a broken promise under which all repairs are tried together
LENGTH_OF_A_ROW = 9  # positions of a row into which documents are packed
_PACKED = "packed"
_UNSEEN = "no attention call was seen: promises were tried from outside only"
_OF_ATTENTION = ("sees-all", "windowed", "order-aware")  # what convolutions and poolings do not promise
_SEVERITIES = {"error": 0, "warning": 1, "note": 2}
_STAGE_LINES = {"project": "score", "outside": "normalize"}  # where a stage's line goes by another stage's name


class Check:
    """The state of one check between its phases."""

    def __init__(self, target: Target, wanted: Selection, dtype: str, seed: int, progress: Progress | None):
        self.started = time.perf_counter()
        target = as_stated(target)
        self.target, self.wanted, self.seed, self.progress = target, wanted, seed, progress
        self.setup: Setup = set_up(target, dtype)
        self.notes: list[str] = [*target.notes, *self.setup.notes]
        self.phase, self.done, self.total = "trying promises", 0, 1
        self.double: tuple[Trial, list[Condition]] | None = None  # what only float64 turns into NaN
        self.aside: tuple[Trial, list[Condition]] | None = None  # conditions that are tried in float32 for that reason
        self.cured: set[str] = (
            set()
        )  # broken promises without a name that the repair of all suspects restores in some trial
        self.left: set[str] = set()  # and those that stay broken in some trial

    def report(self) -> Report:
        self.trial = self._trial()
        self._settle_precision()
        self._refuse_dead()
        plain = self.sites = self._plain_sites()
        self._add_equal_case(plain)
        self.trial.intent = self.intent = self._intent(plain)
        cells, findings = self._judge(self.trial)
        if self.wanted.fault("not-finite"):
            findings += self._in_other_precisions(cells)
        if self.aside is not None:
            trial, conditions = self.aside
            trial.intent = self.intent
            more, found = self._judge(trial)
            names = {c.name for c in conditions}
            cells += [replace(c, note=c.note or "in float32") for c in more if c.condition in names]
            # A call that has its name keeps it: what the same promise shows of it here is told already.
            known = {(name, f.site) for f in findings for name in (f.fault, f.promise)}
            findings += [
                f for f in found if f.condition in names and not {(f.fault, f.site), (f.promise, f.site)} & known
            ]
        packing = self._packed()
        if packing is not None:
            more, found = self._judge_packed(packing)
            cells += more
            findings += found
        longer = self._longer()
        self.trials = [self.trial] if longer is None else [self.trial, longer]
        if longer is not None:
            more, found = self._judge(longer)
            cells += [replace(c, condition=f"{_LONG} · {c.condition}") for c in more if c.verdict != "not-applicable"]
            # What shorter sequences show is not told again, nor more of a call that has its name already.
            told = {f.promise for f in findings}
            named = {f.site.split("#")[0] for f in findings if f.severity != "note"}
            found = [f for f in found if f.promise not in told and f.site.split("#")[0] not in named]
            findings += [replace(f, condition=f"{_LONG} · {f.condition}") for f in found]
        return self._refuse_unseen(self._finish(cells, findings, plain))

    def _intent(self, plain: Sequence[Site]) -> Intent:
        """The stated intent, or what is observed in the runs that are given no mask, or one of ones."""
        found = observed(self.target, self.setup.lengths, plain)
        if not self._attends:
            return replace(found, waived={**dict.fromkeys(_OF_ATTENTION, "no attention call was seen"), **found.waived})
        if found.origin != "observed" or found.mask is None:
            return found
        whole = [c for c in self.trial.conditions if c.layout.samples > 1 and not c.layout.padded]
        others = [observed(self.target, self.setup.lengths, self.trial.sites(c)) for c in whole]
        return narrowest(found, others, plain)

    def _longer(self) -> Trial | None:
        """The model as it is on longer sequences, where another path may run; None where it is fixed, large, or raises."""
        free = [s for s in self.target.streams if s.length is None and s.follows is None]
        if not free or parameters(self.target) > MOST_PARAMETERS_IN_HALF or not self.sites:
            return None
        needed = telling_length(self.trial, MOST_FOR_A_WINDOW) if self.intent.is_windowed else None
        for base in (*((needed,) if needed is not None and needed > max(LONG) else ()), *LONG):
            lengths = lengths_for(self.target.streams, base)
            trial = Trial(
                self.target, self.intent, self.trial.runner, conditions_of(self.target, self.setup.samples), lengths,
                floor=self.trial.floor, seed=self.seed, progress=self._tick,
            )  # fmt: skip
            plain = [c for c in trial.conditions if c.switch.name == PLAIN.name and not narrow(trial, c)]
            trial.conditions = tuple(c for c in plain if "none" not in c.layout.pads.values())
            if all(_runs(trial, c) and not _ill(trial, c) for c in trial.conditions):
                if self.intent.origin == "observed":
                    sites = trial.sites(trial.conditions[0])
                    trial.intent = narrowest(observed(self.target, lengths, sites), [self.intent], sites)
                trial.fed = feeds_of(trial, self.ways)
                return trial
        return None

    def _packed(self) -> Trial | None:
        """The model with documents packed into each row; None where it cannot be told of them, or the intent has packed them already."""
        main, mask = self.target.main, self.intent.mask
        if not self.target.tellings or self.target.documents or not self.wanted.promise(documents_isolated.NAME):
            return None
        if main.length is not None and main.length < 4:
            return None
        target = packed(self.target, split(main.length or LENGTH_OF_A_ROW))
        apart = Mask.documents(ids=target.documents)
        layers = tuple(m & apart for m in self.intent.layers)
        intent = replace(self.intent, mask=apart if mask is None else mask & apart, layers=layers)
        trial = Trial(
            target, intent, self.trial.runner, conditions_of(target, self.setup.samples), lengths_for(target.streams),
            floor=self.trial.floor, seed=self.seed, progress=self._tick,
        )  # fmt: skip
        trial.in_precision = self.trial.in_precision
        plain = [c for c in trial.conditions if c.switch.name == PLAIN.name or c.switch.backend]
        plain = [c for c in plain if c.layout.samples > 1 and not c.layout.padded]
        trial.conditions = tuple(c for c in plain if _runs(trial, c))
        return trial if trial.conditions else None

    def _judge_packed(self, trial: Trial) -> tuple[list[Cell], list[Finding]]:
        """Whether packed documents are kept apart, and which calls let them see each other."""
        self.phase = f"trying {documents_isolated.NAME}"
        cells = list(documents_isolated.try_on(trial))
        seen = Examination(trial, tuple(cells))
        unclaimed = documents_leak.left_to_the_caller(seen)
        if unclaimed and cells[0].verdict == "broken":
            # What it takes does not keep documents apart in this model, nor does anything claim that it would.
            return [], []
        broken = any(c.verdict == "broken" for c in cells)
        told = [s for s in suspects(seen) if s.promise == documents_isolated.NAME] if broken else []
        prover = Prover(trial, cells)
        findings = [_finding(s, *prover.prove(s, told)) for s in told if self.wanted.fault(s.fault.name)]
        if self.wanted.fault("side-channel") and not unclaimed:
            findings += self._side_channels(cells, told, prover)
        return (
            [replace(c, condition=f"{_PACKED} · {c.condition}") for c in cells],
            [replace(f, condition=f"{_PACKED} · {f.condition}") for f in findings],
        )

    def _judge(self, trial: Trial) -> tuple[list[Cell], list[Finding]]:
        """The grid of one trial, and what its broken promises come from."""
        cells = self._grid(trial)
        self.phase = "looking at the sites"
        suspicions = suspects(Examination(trial, tuple(cells)))
        self.phase = "proving"
        prover = Prover(trial, cells)
        suspicions = [s for s in suspicions if not prover.follows(s, suspicions)]
        # What is not wanted is not told, but its repairs still take part: it must not pass for something else.
        told = [s for s in suspicions if self.wanted.fault(s.fault.name) and self.wanted.promise(s.promise)]
        findings = [_finding(s, *prover.prove(s, suspicions)) for s in told]
        if self.wanted.fault("side-channel"):
            findings += self._side_channels(cells, [s for s in suspicions if not s.informs], prover)
        self._note_cured(cells, findings, [s for s in told if not s.informs], prover)
        return cells, findings

    def _note_cured(
        self, cells: Sequence[Cell], findings: Sequence[Finding], suspicions: Sequence[Suspicion], prover: Prover
    ) -> None:
        """Take note of the broken promises that no finding names and that the repairs of what is told restore: they need no other name."""
        for promise in _unnamed(cells, findings):
            broken = {c.condition for c in cells if c.promise == promise and c.verdict == "broken"}
            conditions = [c for c in prover.trial.everything if c.name in broken]
            verdicts = {prover.verdict(promise, c, suspicions) for c in conditions[:MOST_TO_CURE]}
            cured = "kept" in verdicts and "broken" not in verdicts
            (self.cured if cured else self.left).add(promise)

    # -- what is tried ----------------------------------------------------------------------------------------------

    def _trial(self) -> Trial:
        """The trial of every condition under which the model runs."""
        setup = self.setup
        conditions = conditions_of(self.target, setup.samples)
        positions = sum(min(12, s.positions(setup.lengths[s.argument])) for s in self.target.streams)
        self.total = 3 * (positions + 3) + len(conditions) * (2 + len(setup.others))
        floor = noise_floor(self.target, setup.runner, setup.samples, setup.lengths, self.seed)
        intent = self.target.intent or Intent()
        trial = Trial(
            self.target,
            intent,
            setup.runner,
            conditions,
            setup.lengths,
            floor=floor,
            seed=self.seed,
            progress=self._tick,
        )
        trial.in_precision = setup.others
        self.ways = ways_of(setup.runner)
        for runner in (setup.runner, *setup.others.values()):
            runner.remembers = any(way.inside for way in self.ways)
        self._drop_refused(trial)
        trial.fed = feeds_of(trial, self.ways)
        return trial

    def _drop_refused(self, trial: Trial) -> None:
        """Leave out the conditions under which the model raises; each is told in a note."""
        refused: dict[str, str] = {}
        trial.progress = lambda: None  # what the callback raises is not the model's doing
        for condition in trial.conditions:
            self._tick()
            try:
                trial.output(condition)
            except Exception as error:
                said = str(error).splitlines()[0][:160] if str(error) else ""
                refused[condition.name] = f"{type(error).__name__}: {said}".rstrip(": ")
        usable = tuple(c for c in trial.conditions if c.name not in refused)
        if not any(c.switch.name == PLAIN.name for c in usable):
            name, said = next(iter(refused.items()))
            raise CannotCheck(
                f"{self.target.label} raised under every condition, first under {name!r}",
                cause=said,
                hint="give inputs= an example call",
            )
        trial.conditions = usable
        trial.progress = self._tick
        self.notes += [f"not tried: {name} ({said})" for name, said in refused.items()]

    def _tick(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.phase, min(self.done, self.total), self.total)

    def _settle_precision(self) -> None:
        """Conditions that float64 alone turns into NaN are tried in the deployed precision; the fault is told all the same."""
        deployed = self.setup.others.get("float32")
        if self.setup.runner.dtype != torch.float64 or deployed is None:
            return
        ill = [c for c in self.trial.conditions if _ill(self.trial, c)]
        if not ill:
            return
        double, conditions = self.trial, self.trial.conditions
        floor = noise_floor(self.target, deployed, self.setup.samples, self.setup.lengths, self.seed)
        single = Trial(
            self.target,
            double.intent,
            deployed,
            conditions,
            self.setup.lengths,
            floor=floor,
            seed=self.seed,
            progress=self._tick,
        )
        if any(_ill(single, c) for c in ill):
            return
        names = ", ".join(c.name for c in ill[:3])
        self.notes.append(
            f"float64 alone gives outputs that are not finite ({names}); there the promises are tried in float32"
        )
        self.double = (double.repaired({}, ill), ill)
        if any(c.switch.name == PLAIN.name for c in ill):
            halves = {n: r for n, r in self.setup.others.items() if n != "float32"}
            single.in_precision = {"float64": double.runner, **halves}
            single.fed = double.fed
            self.trial = single
            return
        # The model as it is runs well in float64: only the ill switches are tried in float32, beside their plain runs.
        layouts = {c.layout.name for c in ill}
        plain = [c for c in conditions if c.switch.name == PLAIN.name and c.layout.name in layouts]
        double.conditions = tuple(c for c in conditions if c not in ill)
        single.conditions = tuple(c for c in conditions if c in ill or c in plain)
        self.aside = (single, ill)

    def _refuse_dead(self) -> None:
        """A model whose output no input moves cannot be judged: every mask would pass.

        One that is dead under a mask of ones alone is alive: such a mask hides everything there.
        """
        plain = [c for c in self.trial.conditions if c.switch.name == PLAIN.name]
        for condition in (plain[0], *(c for c in plain if c.layout.padded)):
            if _ill(self.trial, condition):
                return
            influence = self.trial.influence(condition)
            least = min(self.trial.threshold(influence.base), 1e-13 * float(influence.base.abs().amax()))
            if any(float(m.amax()) > least for m in influence.moved.values()):
                return
        raise CannotCheck(
            f"no change of any input moves the output of {self.target.label}",
            cause="its output does not depend on its inputs (zero-initialised output projection, or the wrong argument is changed)",
            hint="load trained weights, redraw the zeros, or give inputs= an example call",
        )

    def _add_equal_case(self, sites: Sequence[Site]) -> None:
        """One more condition, with as many samples as the calls have heads, where the model runs that way."""
        heads = [s.heads for s in sites if s.heads <= MOST_HEADS]
        most = max(set(heads), key=heads.count, default=0)
        equal = equal_case(self.target, self.trial.conditions, most)
        if equal is not None and _runs(self.trial, equal):
            self.trial.conditions = (*self.trial.conditions, equal)

    def _plain_sites(self) -> tuple[Site, ...]:
        plain = [c for c in self.trial.conditions if c.switch.name == PLAIN.name]
        wide = next((c for c in plain if c.layout.samples > 1), plain[0])
        sites = self.trial.sites(wide)
        if sites:
            return sites
        if self.trial.runner.opaque:
            self.notes.append(
                "no attention call could be looked at: scripted, vectorised or custom code hides it; "
                "promises were tried from outside only"
            )
            return ()
        # What is broken is told all the same; but with nothing seen to attend, nothing counts as kept. What a state
        # carries on from piece to piece is no attention's doing.
        self.notes.append(_UNSEEN)
        self.trial.fed = ()
        return ()

    @property
    def _attends(self) -> bool:
        return bool(self.sites) or self.trial.runner.opaque

    def _refuse_unseen(self, report: Report) -> Report:
        """A report of a model in which nothing was seen to attend, where it has something to tell."""
        if self._attends or report.verdict == "broken":
            return report
        raise CannotCheck(
            f"no attention call was seen while {self.target.label} ran",
            cause="no product of queries and keys meets a softmax and then values, and no fused attention kernel ran",
            hint="check a part of the model that attends, written in plain PyTorch",
        )

    def _grid(self, trial: Trial) -> list[Cell]:
        cells: list[Cell] = []
        for promise in PROMISES.values():
            if promise.name in trial.intent.waived:
                reason = trial.intent.waived[promise.name]
                cells += [
                    Cell(promise.name, c.name, "not-applicable", note=f"waived: {reason}") for c in trial.conditions
                ]
                continue
            if not self.wanted.promise(promise.name):
                cells += [Cell(promise.name, c.name, "not-tried", note="not selected") for c in trial.conditions]
                continue
            self.phase = f"trying {promise.name}"
            cells += promise.try_on(trial)
        return cells

    # -- what is found ----------------------------------------------------------------------------------------------

    def _in_other_precisions(self, cells: Sequence[Cell]) -> list[Finding]:
        """NaN in one precision alone, located and proven there: a warning in float64, which nobody deploys, and in float16."""
        findings = []
        if self.double is not None:
            findings += self._not_finite(*self.double, severity="warning")
        broken = {c.condition for c in cells if c.promise == "finite" and c.verdict == "broken"}
        for name, runner in self.trial.in_precision.items():
            if name in broken and name != "float64" and not any(c.name in broken for c in self.trial.conditions):
                trial = Trial(
                    self.target,
                    self.intent,
                    runner,
                    self.trial.conditions,
                    self.setup.lengths,
                    seed=self.seed,
                    progress=self._tick,
                )
                ill = [c for c in trial.conditions if _runs(trial, c) and _ill(trial, c)]
                trial.conditions = tuple(ill)
                findings += self._not_finite(trial, ill, severity="warning" if name == "float16" else "error")
        return findings

    def _not_finite(self, trial: Trial, conditions: Sequence[Condition], *, severity: Severity) -> list[Finding]:
        seen = Examination(trial, tuple(Cell("finite", c.name, "broken", 1.0, 0.0) for c in conditions))
        found: dict[str, Suspicion] = {}
        for suspicion in FAULTS["not-finite"].look(seen):
            message = f"in {short(trial.runner.dtype)}, {suspicion.message}"
            place = suspicion.site.key_name if suspicion.site else ""
            found.setdefault(place, replace(suspicion, severity=severity, message=message))
        prover, everyone = Prover(trial, seen.cells), list(found.values())
        return [_finding(s, *prover.prove(s, everyone)) for s in everyone]

    def _side_channels(self, cells: Sequence[Cell], suspicions: Sequence[Suspicion], prover: Prover) -> list[Finding]:
        found = carried_elsewhere(cells, suspicions, prover, unseen=not self.sites)
        return [_finding(s, bool(s.proven_by), s.proven_by or s.unprovable) for s in found]

    def _finish(self, cells: list[Cell], findings: list[Finding], sites: Sequence[Site]) -> Report:
        findings.sort(key=lambda f: (_SEVERITIES[f.severity], f.site))
        unexplained = _unexplained(cells, findings, self.cured - self.left)
        self.notes += unexplained + self._about_padding() + self._about_intent(cells) + self._odd_one_out(findings)
        runners = [self.trial.runner, self.setup.runner, *self.setup.others.values()]
        intent = self.intent
        return Report(
            target=self.target.label,
            verdict=_verdict(cells, findings, unexplained),
            intent=f"{intent} ({intent.origin})" if intent.mask is not None else str(intent),
            grid=tuple(cells),
            findings=tuple(findings),
            sites=tuple(s.record() for s in sites),
            environment=_environment(self.trial.runner),
            forwards=sum(r.forwards for r in {id(r): r for r in runners}.values()),
            seconds=round(time.perf_counter() - self.started, 3),
            notes=tuple(self.notes),
        )

    def _about_intent(self, cells: Sequence[Cell]) -> list[str]:
        """What of an intent no promise judges yet must not pass for kept."""
        mask = self.intent.mask
        length = self.setup.lengths[self.target.main.argument]
        if mask is None or self.intent.origin == "observed":
            return []
        notes = []
        if self.intent.is_windowed and not any(bites(t) for t in self.trials):
            longest = max(t.lengths[self.target.main.argument] for t in self.trials)
            notes.append(
                f"the window of the intent ({self.intent}) is longer than the {longest} positions tried, so it was not judged; "
                "--length N tries longer sequences"
            )
        seen = mask.without_bands().matrix(length)
        earlier = ~seen & torch.ones_like(seen).tril()
        apart = any(c.promise == "documents-isolated" and c.verdict in ("kept", "broken") for c in cells)
        if apart or (seen.dim() == 2 and not bool(earlier.any())):
            return notes
        return [
            *notes,
            f"of the intent {mask!s}, only later keys, windows and pads are judged: that it hides other earlier keys is not",
        ]

    def _odd_one_out(self, findings: Sequence[Finding]) -> list[str]:
        """Where nobody states an intent: the layer that differs from its peers, unless it is told as a fault."""
        if self.intent.origin != "observed" or not self.wanted.fault("window-ignored"):
            return []
        told = {f.site for f in findings if FAULTS[f.fault].stage == "mask"}
        trial = self.trials[-1]  # the longest sequences show most
        conditions = [c for c in trial.conditions if c.switch.name == PLAIN.name and not c.layout.padded]
        found = odd_one_out(self.target, trial.lengths, trial.sites(conditions[0])) if conditions else None
        if found is None or found[0].path in told:
            return []
        return [f"one layer differs from its peers: {found[1]}; if that is not meant, state the intent"]

    def _about_padding(self) -> list[str]:
        masks = [s.padding for s in self.target.streams if s.padding is not None]
        if not masks:
            said = "no key mask of this model was tried" if self.target.known else "the model takes no key mask"
            return [said if self.target.known else f"{said}: it has no way to ignore pads"]
        return [
            f"{m.argument}: a true entry {'keeps' if m.keep else 'hides'} a key, as observed; "
            f"state it with --padding {m.argument}:{'keep' if m.keep else 'hide'}"
            for m in masks
            if m.observed
        ]


def _runs(trial: Trial, condition: Condition) -> bool:
    try:
        trial.output(condition)
    except Exception:
        return False
    return True


def _verdict(cells: Sequence[Cell], findings: Sequence[Finding], unexplained: Sequence[str]) -> Verdict:
    if unexplained or any(f.severity == "error" for f in findings):
        return "broken"
    return "kept" if any(c.verdict in ("kept", "broken") for c in cells) else "unchecked"


def _ill(trial: Trial, condition: Condition) -> bool:
    output = trial.output(condition)
    return not bool(torch.isfinite(output[trial.real_rows(condition, output.shape[1])]).all())


def _finding(suspicion: Suspicion, proven: bool, note: str) -> Finding:
    site = suspicion.site
    stage = suspicion.fault.stage
    source = suspicion.source
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


def _unexplained(cells: Sequence[Cell], findings: Sequence[Finding], cured: Set[str]) -> list[str]:
    """A broken promise that no finding explains, nor the repair of all suspects restores, must not pass in silence."""
    notes = []
    for promise in _unnamed(cells, findings):
        if promise not in cured:
            first = next(c for c in cells if c.promise == promise and c.verdict == "broken")
            notes.append(f"{promise} is broken under {first.condition!r}, and no fault known here explains it")
    return notes


def _unnamed(cells: Sequence[Cell], findings: Sequence[Finding]) -> list[str]:
    """The broken promises that no finding speaks of, but for those that only inform."""
    explained = {p for f in findings for p in (f.promise, *FAULTS[f.fault].promises)}
    informing = {p for p in PROMISES if all(f.severity == "note" for f in FAULTS.values() if p in f.promises)}
    broken = dict.fromkeys(c.promise for c in cells if c.verdict == "broken")
    return [p for p in broken if p not in explained | informing]


def _environment(runner: Runner) -> dict[str, str]:
    versions = {"intently": __version__, "torch": torch.__version__, "python": platform.python_version()}
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        versions["transformers"] = str(getattr(transformers, "__version__", "?"))
    return {**versions, "dtype": short(runner.dtype)}
