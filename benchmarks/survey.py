"""Checks tiny random models of transformers types, one process each, resumable: `python -m benchmarks.survey [TYPES…]`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import intently
from benchmarks import workers, written
from intently.errors import CannotCheck
from intently.targets import huggingface, shrink
from intently.targets import huggingface_build as building

LIMIT = 120.0  # seconds a type
STATE = written.RESULTS / "survey.jsonl"

# Fields that choose how attention is made; each is tried the other way round.
_SWITCHES = re.compile(
    r"alibi|bidirectional|is_decoder|is_causal|^causal$|add_cross_attention|cross_attn_all|use_sliding_window|multi_query|"
    r"parallel_(attn|residual)|new_decoder|qk_(layer_?)?norm|qk_ln|relative|rotary|interleave|sink|scale_attn|"
    r"upcast|use_rope|(attention|attn|qkv|query|key|use)_bias$|abs_pos|rel_pos|gated_attn|attn_uses|learned_position"
)


# Fields that are no plain switches, with the values that some types take.
_CHOICES: Mapping[str, Sequence[Any]] = {
    "use_bidirectional_attention": (True,),
    "sliding_window": (4,),
    "attn_logit_softcapping": (5.0,),
    "position_embedding_type": ("absolute", "rotary", "rope", "relative_key", "relative_key_query"),
    "position_embeddings_type": ("relative", "relative_key", "rotary"),
    "attention_type": ("original_full", "factorized"),
    "encoder_attention_type": ("transient-global",),
    "attn_type": ("uni",),
}
_OF_ALL = frozenset({"is_decoder", "add_cross_attention"})
# Fields that say something only together.
_TOGETHER = (
    {"is_decoder": True, "add_cross_attention": True},
    {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    {"alibi": True, "new_decoder_architecture": True},
)


def variants(model_type: str) -> Iterator[str]:
    """The type with each switch of its attention turned, and with the other choices that its fields have."""
    try:
        config = building._default_config(model_type)
    except building.CannotBuild:
        return
    # Whether a part of several is a decoder follows from its place among them.
    held = {f: v for path, part in shrink._walk(config) for f, v in vars(part).items() if not path or f not in _OF_ALL}
    for field, value in held.items():
        if isinstance(value, bool) and _SWITCHES.search(field):
            yield f"{model_type}?{field}={json.dumps(not value)}"
        elif value is None or isinstance(value, str):  # a number is a size, which the shrinking chooses
            for other in _CHOICES.get(field, ()):
                if isinstance(other, str) == isinstance(value, str) and other != value:
                    yield f"{model_type}?{field}={json.dumps(other)}"
    for fields in _TOGETHER:
        if fields.keys() <= held.keys():
            yield f"{model_type}?" + _set(fields)
    yield from _decoders(model_type, held)


def _decoders(model_type: str, held: Mapping[str, Any]) -> Iterator[str]:
    """Where a type is another first of all: its class for text that goes on, alone and reading a memory."""
    others = [n for table in (*building._MASKED, *building._SEQ2SEQ) for n in building._names(table, model_type)]
    for name in building._names(building._CAUSAL[0], model_type) if others else ():
        if held.get("is_encoder_decoder") or not held.keys() >= _OF_ALL:
            yield f"{model_type}/{name}"
        else:
            for fields in ({"is_decoder": True}, dict.fromkeys(sorted(_OF_ALL), True)):
                yield f"{model_type}/{name}?" + _set(fields)


def _set(fields: Mapping[str, Any]) -> str:
    return "&".join(f"{name}={json.dumps(value)}" for name, value in fields.items())


def one(name: str) -> dict[str, Any]:
    """One type, checked: what is said of it and what that cost, or why it could not be."""
    torch.set_num_threads(1)
    try:
        target = huggingface.tiny(name)
    except CannotCheck as error:
        return {"why": str(error)[:200]}
    told = {"class": type(target.model).__name__}
    try:
        report = intently.check(target)
    except CannotCheck as error:
        return {**told, "why": f"built, but not checked: {error}"[:200]}
    findings = [
        {"fault": f.fault, "site": f.site, "severity": f.severity, "proof": f.proof, "condition": f.condition}
        for f in report.findings
    ]
    unnamed = [n for n in report.notes if "no fault known" in n]
    cost = {"seconds": round(report.seconds, 1), "forwards": report.forwards, "sites": len(report.sites)}
    return {
        **told,
        "verdict": report.verdict,
        "intent": report.intent,
        "findings": findings,
        "unnamed": unnamed,
        **cost,
    }


def errors(row: dict[str, Any]) -> list[str]:
    """The errors of one type, those of one fault together."""
    by_fault: dict[tuple[str, str], list[str]] = {}
    for f in row.get("findings", ()):
        if f["severity"] == "error":
            by_fault.setdefault((f["fault"], f["proof"]), []).append(f["site"])
    said = [
        f"{fault} at {sites[0]}{f' and {len(sites) - 1} more' if sites[1:] else ''} ({proof})"
        for (fault, proof), sites in by_fault.items()
    ]
    return [*said, *row.get("unnamed", ())]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Every type: what was said, errors first, then what was kept, then what could not be checked."""
    order = {"broken": 0, "unchecked": 1, "kept": 2, "": 3}
    shown = sorted(rows, key=lambda r: (order[r.get("verdict", "")], r["name"]))
    lines = [
        (r["name"], r.get("class", ""), r.get("verdict", "not checked"), "; ".join(errors(r)) or r.get("why", ""), r.get("intent", ""),
         r.get("forwards", ""), r.get("seconds", r.get("took", "")))
        for r in shown
    ]  # fmt: skip
    checked = [r for r in rows if r.get("verdict")]
    took = sorted(r["seconds"] for r in checked)
    counts = {v: sum(r["verdict"] == v for r in checked) for v in ("kept", "broken", "unchecked")}
    note = f"{len(rows)} names, {len(checked)} built and checked: {counts['kept']} kept, {counts['broken']} broken, {counts['unchecked']} unchecked"
    note += f"; median check {took[len(took) // 2]} s" if took else ""
    columns = ("type", "class", "verdict", "errors, or why not", "intent", "forwards", "seconds")
    return written.table("Survey of transformers types", columns, lines, f"transformers {_version()}. {note}")


def _version() -> str:
    import transformers

    return transformers.__version__


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survey", description=__doc__)
    parser.add_argument("types", nargs="*", help="types, as behind hf:; all that transformers knows when none is named")
    parser.add_argument(
        "--variants", action="store_true", help="also every type with one switch of its attention turned"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--anew", action="store_true", help="forget what was done before")
    given = parser.parse_args()
    if given.anew:
        STATE.unlink(missing_ok=True)
    types = given.types or list(building.model_types())
    names = [n for t in types for n in (t, *(variants(t) if given.variants else ()))]
    state = workers.State(STATE)
    if given.types:
        state.done = {n: row for n, row in state.done.items() if n not in names}
    run = workers.each(names, lambda n: workers.outcome("benchmarks.survey", n, limit=LIMIT), state, given.processes)
    for number, (name, row) in enumerate(run, 1):
        print(
            f"{number}/{len(names)} {name}: {row.get('verdict', 'not checked')} {'; '.join(errors(row)) or row.get('why', '')} ({row.get('took')} s)",
            flush=True,
        )
    if not given.types:
        print(f"wrote {written.write('survey.md', table([state.done[n] for n in names]))}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; what was done is kept, and the next run goes on from there")
