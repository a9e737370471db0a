"""Runs a model and finds its attention calls: a torch function mode that follows scores to weights to values."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from intently.sites import contraction, ops
from intently.sites.assemble import assemble
from intently.sites.call import Call as AttentionCall
from intently.sites.call import content_of, role_of
from intently.sites.contraction import Contraction
from intently.sites.frames import Names, locate, parameters_of
from intently.sites.fused import assemble_flex, assemble_fused
from intently.sites.projection import remember
from intently.sites.provenance import Call, Node, Provenance, is_weight, tensors_in
from intently.sites.site import Site
from intently.sites.trace_types import Pending, Score, Sizes

Edit = Callable[[Site], Any]
TABLE = 1 << 16  # entries of the largest tensor that is kept as a table
SUMS = ops.CONTRACTIONS | {
    "sum",
    "mean",
    "nansum",
    "norm",
    "vector_norm",
    "linalg_vector_norm",
    "linalg_norm",
    "normalize",
    "cumsum",
}


@dataclass
class Settings:
    """How to trace: keep the stage tensors or only describe them; edits by site name.

    `edited_only`: the run is made for its output, so calls that nobody edits are not described.
    """

    keep: bool = False
    edited_only: bool = False
    edits: Mapping[str, Edit] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)


class Tracer(TorchFunctionMode):
    """Records where each tensor came from and, at every product of weights with values, one attention call."""

    def __init__(self, root: object, arguments: Mapping[str, Any], settings: Settings):
        super().__init__()
        self.names = Names(root)
        self.known = Provenance()
        self.settings = settings
        self.calls: list[AttentionCall] = []
        self.fired: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._holds = settings.keep or bool(settings.edits)
        self._ready: dict[frozenset[str], Tensor] = {}
        self._unused: dict[Node, Pending] = {}  # softmaxes by their logits, until their weights meet values
        for name, tensor in parameters_of(root).items():
            self.known.leaf(tensor, name)
        for name, value in arguments.items():
            for tensor in tensors_in([value]):
                node = self.known.leaf(tensor, f"argument:{name}", argument=name)
                if tensor.dim() == 3 and tensor.is_floating_point():
                    self._ready[node.origins] = tensor

    # -- the mode ---------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = ops.name_of(func)
        if name == "multi_head_attention_forward":
            with self:
                return _without_dispatch(func)(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return self._fused(func, args, kwargs)
        before = self.known.of(args[0]) if args and isinstance(args[0], Tensor) and ops.is_in_place(func) else None
        product = self._product(name, args, kwargs)
        result = func(*args, **kwargs)
        if name == "setitem":
            self._record(name, func, args, kwargs, args[0], before)
            return result
        if product is not None and isinstance(result, Tensor):
            return self._close(product, name, func, args, kwargs, result)
        if isinstance(result, Tensor):
            self._record(name, func, args, kwargs, result, before)
        elif isinstance(result, (tuple, list)):
            for index, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._record(name, func, args, kwargs, part, None, index=index)
        return result

    # -- recording --------------------------------------------------------------------------------------------------

    def _node(self, name: str, func: Any, args: Any, kwargs: Any, shape: torch.Size, index: int | None = None) -> Node:
        tensors = tensors_in([*args, *kwargs.values()])
        inputs = tuple(dict.fromkeys(self.known.of(t) for t in tensors))
        origins = frozenset().union(*(n.origins for n in inputs)) if inputs else frozenset()
        replayed = name in ops.MOVES or name in ops.TURNS
        if replayed and self._holds:
            self._hold_tables(args[1:] if ops.is_in_place(func) else tensors)
        call = Call(func, self._plain(args), {k: self._plain(v) for k, v in kwargs.items()}) if replayed else None
        return Node(name, inputs, shape, origins, call=call, index=index)

    def _hold_tables(self, values: Any) -> None:
        """Keep tensors that hold no content (angles, their sines) where they meet some: rotations are measured by them."""
        for tensor in tensors_in(values):
            node = self.known.of(tensor)
            if not content_of(node.origins) and tensor.numel() <= TABLE:
                node.facts.setdefault("held", tensor.detach())

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # Index tensors stay themselves, so that a gather can be replayed.
            return value if value.dtype in (torch.int64, torch.int32) and value.dim() <= 2 else self.known.of(value)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(self._plain(v) for v in value)
        return value

    def _record(
        self,
        name: str,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Tensor,
        before: Node | None,
        index: int | None = None,
    ) -> None:
        if before is None and any(result is t for t in args if isinstance(t, Tensor)):
            return  # nothing was made: `contiguous` and `to` may return their argument
        node = self._node(name, func, args, kwargs, result.shape, index)
        if before is not None and before not in node.inputs:
            node.inputs = (before, *node.inputs)
        facts = node.facts
        made = contraction.read(name, args, kwargs, self._factors) if self._contracts(name, args, kwargs) else None
        if made is not None:
            self._score(made, name, args, kwargs, node)
        elif name in ops.EXPONENTIALS:
            self._softmax(name, node, args, kwargs)
        elif name == "mul" and index is None and before is None:
            self._broadcast_product(args, result, node)
        self._inherit(name, node, args, kwargs)
        if self.settings.keep or self.settings.edits:
            remember(node, name, args, kwargs, made)
        if self.settings.keep and result.dim() == 3 and result.is_floating_point() and node.origins:
            self._ready.pop(node.origins, None)
            self._ready[node.origins] = result  # the latest comes last
        if name in ("linear", "addmm") or facts.get("projection"):
            self._merged(node)
        if name == "div" and "product" in facts:
            self._divided(node, args)
        self.known.put(result, node)
        if before is not None and result is not args[0]:
            self.known.put(args[0], node)
        if name == "setitem" or before is not None:
            base = args[0]._base
            if base is not None and base is not result:
                parent = self.known.of(base)
                merged = Node("setitem", (parent, node), base.shape, parent.origins | node.origins)
                self._inherit("setitem", merged, (base, args[0]), {})
                self.known.put(base, merged)

    def _inherit(self, name: str, node: Node, args: Any, kwargs: Any) -> None:
        """Pass on what is known of the inputs: these are scores, these are weights, this is an output."""
        if "weights" in node.facts or "score" in node.facts:
            return
        # Heads mixed by a parameter (talking heads), before or after the softmax, stay scores and stay weights.
        mixing = (name in ops.CONTRACTIONS or name == "linear") and "product" not in node.facts and _mixes(node)
        if (name in ops.CONTRACTIONS or name in ops.PER_POSITION) and not mixing:
            return
        elementwise = name not in ops.REDUCTIONS or (name == "mean" and bool(kwargs.get("keepdim")))
        if name in ops.RANDOM or (elementwise and any("random" in i.facts for i in node.inputs)):
            node.facts["random"] = True
        for source in node.inputs:
            facts = source.facts
            if "weights" in facts and name in SUMS:
                facts["weights"].summed = True
            if name == "sum" and "weights" in facts:
                node.facts["total"] = (facts["weights"], args[1] if len(args) > 1 else kwargs.get("dim"))
            if not elementwise:
                continue
            for fact in ("weights", "score", "total"):
                if fact in facts and fact not in node.facts:
                    if fact == "score" and len(node.inputs) > 1 and name in ops.MOVES:
                        together = [s for i in node.inputs for s in i.facts.get("score", ())]
                        node.facts["score"] = tuple({id(s): s for s in together}.values())
                    elif fact == "score":
                        node.facts["score"] = _preferred([i.facts.get("score", ()) for i in node.inputs])
                    elif fact == "weights" and name in ops.MOVES and len(node.inputs) > 1:
                        node.facts["weights"] = _joined(
                            [i.facts["weights"] for i in node.inputs if "weights" in i.facts]
                        )
                    else:
                        node.facts[fact] = facts[fact]
            if "product" in facts and (name in ops.MOVES or name in ops.COPIES or name == "div" or name == "alias"):
                node.facts.setdefault("product", facts["product"])
        pending = node.facts.get("weights")
        if isinstance(pending, Pending) and name in ops.RANDOM_DROPS:
            p, active = _dropout(name, args, kwargs)
            if active and p > 0:
                pending.dropout = p
                pending.dropout_source = locate(self.names)[1]
        if "weights" in node.facts:
            node.facts.pop("score", None)
            if (
                isinstance(pending, Pending)
                and "random" in node.facts
                and not pending.dropout
                and name in ("mul", "div", "where", "masked_fill")
            ):
                pending.dropout = _share_dropped(node, args)
                pending.dropout_source = locate(self.names)[1]

    def _score(self, made: Contraction, name: str, args: Any, kwargs: Any, node: Node) -> None:
        nodes = self._operand_nodes(made, name, args, kwargs)
        weights = [is_weight(n) for n in nodes]
        if any(weights) and not all(weights):
            node.facts["projection"] = (
                made.labels[weights.index(False)],
                made.output,
                made.labels[weights.index(True)],
            )
        if all(weights) or len(nodes) != 2 or not node.origins:
            return
        node.facts["score"] = (Score(made, node, nodes, locate(self.names)[1], any(weights)),)

    def _operand_nodes(self, made: Contraction, name: str, args: Any, kwargs: Any) -> tuple[Node, ...]:
        """The nodes of a contraction's operands, in its order; of a product and a sum, those of the two factors."""
        tensors = self._factors(args[0]) if name == "sum" else made.operands
        if name == "linear":  # its second operand is used transposed
            weight = self.known.of(args[1] if len(args) > 1 else kwargs["weight"])
            turned = Node("transpose", (weight,), made.operands[1].shape, weight.origins)
            turned.call = Call(torch.transpose, (weight, -2, -1), {})
            turned.facts.update({k: v for k, v in weight.facts.items() if k in ("score", "weights")})
            return (self.known.of(made.operands[0]), turned)
        return tuple(self.known.of(t) for t in tensors or ())

    def _softmax(self, name: str, node: Node, args: Any, kwargs: Any) -> None:
        argument = args[0] if args else kwargs.get("input")
        if not isinstance(argument, Tensor):
            return
        source = self.known.of(argument)
        if name in ("exp_", "sigmoid_") and node.inputs:
            source = node.inputs[0]
        if "weights" in source.facts or not node.origins or argument.dim() < 2:
            return
        scores = source.facts.get("score", ())
        if not scores and name not in ("softmax", "_softmax", "exp"):
            return
        dim = None
        if "softmax" in name:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        kept = argument if name not in ("exp_", "sigmoid_") else argument.detach().log()
        pending = Pending(scores, kept, source, node, name, dim, locate(self.names)[1])
        node.facts["weights"] = pending
        if scores and "softmax" in name:
            self._unused[source] = replace(pending, node=source, how="softmax, unused")

    def _broadcast_product(self, args: Any, result: Tensor, node: Node) -> None:
        pair = [a for a in args if isinstance(a, Tensor)]
        if len(pair) != 2 or all(t.shape == result.shape for t in pair):
            return
        nodes = [self.known.of(t) for t in pair]
        if all(n.origins for n in nodes) or any("weights" in n.facts for n in nodes):
            node.facts["factors"] = tuple(pair)

    def _contracts(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a call sums a product of tensors: a linear layer only when its weight is no parameter."""
        if name == "linear":
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            return (
                isinstance(weight, Tensor)
                and not is_weight(self.known.of(weight))
                and bool(self.known.of(weight).origins)
            )
        return name in ops.CONTRACTIONS or name in ("sum", "rmatmul")

    def _factors(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        node = self.known.of(tensor)
        return node.facts.get("factors")

    # -- products with values ---------------------------------------------------------------------------------------

    def _product(self, name: str, args: Any, kwargs: Any) -> tuple[Contraction, int, Pending] | None:
        """Weights times values, seen before it runs (so that an edit can change the weights)."""
        if not self._contracts(name, args, kwargs):
            return None
        made = contraction.read(name, args, kwargs, self._factors)
        if made is None:
            return None
        nodes = self._operand_nodes(made, name, args, kwargs)
        for index, node in enumerate(nodes):
            pending = node.facts.get("weights", self._unused.get(node))
            if not isinstance(pending, Pending):
                continue
            others = [n for i, n in enumerate(nodes) if i != index]
            if all(is_weight(n) for n in others):
                return None  # heads mixed by a parameter after the softmax: still weights
            if not made.summed(index):
                return None
            columns = {a for i, axes in enumerate(made.labels) if i != index for a in axes} - set(made.labels[index])
            if name == "sum" and not columns & set(made.output):
                return None  # a mask multiplied in and summed up, not values
            scored = bool(pending.scores) and not any(s.fixed_side for s in pending.scores)
            if not scored:
                keys = [made.size(a) for a in made.summed(index)]
                if not any(k in self.settings.sizes.lengths for k in keys):
                    return None
            return made, index, pending
        return None

    def _close(
        self, product: tuple[Contraction, int, Pending], name: str, func: Any, args: Any, kwargs: Any, result: Tensor
    ) -> Tensor:
        made, index, pending = product
        self._unused.pop(pending.logits_node, None)
        path, source = locate(self.names)
        node = self._node(name, func, args, kwargs, result.shape)
        operands = self._operand_nodes(made, name, args, kwargs)
        key = self._key(path)
        if self._passed_over(key, node, result):
            return result
        call = assemble(
            made, index, operands, pending, result, self.settings.sizes, keep=self.settings.keep or key in self.settings.edits,
            path=path, source=source,
        )  # fmt: skip
        result = self._finish(call, key, result)
        node.facts["product"] = call
        self.known.put(result, node)
        call.node = node
        return result

    def _passed_over(self, key: str, node: Node, result: Tensor) -> bool:
        """Whether a call need not be described; what follows it is told all the same that it is one."""
        if not self.settings.edited_only or key in self.settings.edits:
            return False
        node.facts["product"] = None
        self.known.put(result, node)
        return True

    def _finish(self, call: AttentionCall, key: str, result: Tensor) -> Tensor:
        self.calls.append(call)
        call.key = key
        call.site = replace(call.site, key_name=key, role=role_of(call.site))
        if call.site.tensors is not None:
            call.site = replace(call.site, ready=dict(self._ready))
        edit = self.settings.edits.get(key)
        if edit is None:
            return result
        self.fired[key] = self.fired.get(key, 0) + 1
        changed = edit(call.site)
        if changed is None:
            return result
        return call.replace(changed, result, describe=not self.settings.edited_only)

    def _key(self, path: str) -> str:
        count = self._counts.get(path, 0)
        self._counts[path] = count + 1
        return f"{path}#{count}"

    def _merged(self, node: Node) -> None:
        """The output of a call reaches a projection: where its heads must lie side by side, token by token."""
        read = node.facts.get("projection")
        for source in node.inputs:
            call = source.facts.get("product")
            if not isinstance(call, AttentionCall):
                continue
            # The axes that a projection sums over are one token's features: the last one, or those an einsum names.
            labels = read[0] if read is not None and len(read[0]) == len(source.shape) else ()
            features = [i for i, a in enumerate(labels) if a not in read[1]] if read is not None else []
            groups = [i for i, a in enumerate(labels) if a in read[1] and a in read[2]] if read is not None else []
            call.merged_at(source, features or [len(source.shape) - 1], groups)

    def _divided(self, node: Node, args: Any) -> None:
        """`(exp(x) @ v) / exp(x).sum()`: the softmax was finished after the product."""
        call = node.facts["product"]
        for source in node.inputs:
            total = source.facts.get("total")
            if total is not None and isinstance(call, AttentionCall) and total[0] is call.pending:
                divisor = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None
                call.divided_by(divisor)

    # -- fused kernels ----------------------------------------------------------------------------------------------

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        result = func(*args, **kwargs)
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        path, source = locate(self.names)
        node = self._node("scaled_dot_product_attention", func, args, kwargs, result.shape)
        key = self._key(path)
        if self._passed_over(key, node, result):
            return result
        nodes = {k: self.known.of(v) for k, v in named.items() if isinstance(v, Tensor)}
        call = assemble_fused(
            named,
            nodes,
            result,
            self.settings.sizes,
            keep=self.settings.keep or key in self.settings.edits,
            path=path,
            source=source,
        )
        result = self._finish(call, key, result)
        node.facts["product"] = call
        self.known.put(result, node)
        call.node = node
        return result

    def flex(self, args: Any, kwargs: Any, result: Tensor) -> Tensor:
        """A call of `flex_attention`, already made: describe it, and let an edit replace its output."""
        from intently.sites.flex import evaluated

        names = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa")
        named = dict(zip(names, args, strict=False)) | kwargs
        path, source = locate(self.names)
        tensors = {k: named[k] for k in ("query", "key", "value")}
        nodes = {k: self.known.of(v) for k, v in tensors.items()}
        origins = frozenset().union(*(n.origins for n in nodes.values()))
        node = Node("flex_attention", tuple(nodes.values()), result.shape, origins)
        key = self._key(path)
        if self._passed_over(key, node, result):
            return result
        scale = named.get("scale")
        scale = tensors["query"].shape[-1] ** -0.5 if scale is None else float(scale)
        with torch._C.DisableTorchFunction():
            call = assemble_flex(
                tensors["query"].detach(), tensors["key"].detach(), tensors["value"].detach(), evaluated(named.get("score_mod"), named.get("block_mask"), scale),
                scale, nodes, result, self.settings.sizes, keep=self.settings.keep or key in self.settings.edits, path=path, source=source,
            )  # fmt: skip
            result = self._finish(call, key, result)
        node.facts["product"] = call
        self.known.put(result, node)
        call.node = node
        return result

    def adopt(self, output: Any, shadow: Any) -> None:
        """Give the tensors of `output` the history of the tensors of `shadow`, a second run of the same call."""
        for mine, theirs in zip(tensors_in([output]), tensors_in([shadow]), strict=False):
            self.known.put(mine, self.known.of(theirs))

    def opaque(self) -> bool:
        """Whether a tensor with the batch's sizes came from no call that was seen: scripted, compiled or custom code made it."""
        sizes = self.settings.sizes
        return any(sizes.batch in shape and bool(sizes.lengths & set(shape)) for shape in self.known.unseen)

    def sites(self) -> tuple[Site, ...]:
        """Every call found, in the order in which they ran; several in one module are numbered."""
        total: dict[str, int] = {}
        for call in self.calls:
            total[call.path] = total.get(call.path, 0) + 1
        return tuple(call.finished(numbered=total[call.path] > 1) for call in self.calls)


def _mixes(node: Node) -> bool:
    """Whether a contraction has weights or scores on one side and a parameter on the other."""
    sides = [i for i in node.inputs if not is_weight(i)]
    return len(sides) == 1 and ("weights" in sides[0].facts or "score" in sides[0].facts)


def _share_dropped(node: Node, args: Any) -> float:
    """The share of entries that a random mask made zero; 0.5 where it cannot be told."""
    masks = [a for a in args if isinstance(a, Tensor) and a.dtype == torch.bool]
    masks += [
        a for a in args if isinstance(a, Tensor) and a.is_floating_point() and bool(((a == 0) | (a == a.amax())).all())
    ]
    return max(round(float((masks[0] == 0).double().mean()), 2), 0.01) if masks else 0.5


def _joined(pendings: Sequence[Any]) -> Any:
    """Weights of several heads put side by side: one pending softmax with all their scores (the first one speaks)."""
    first = pendings[0]
    if all(p is first for p in pendings):
        return first
    return Pending(
        tuple(s for p in pendings for s in p.scores),
        first.logits,
        first.logits_node,
        first.node,
        "joined",
        first.dim,
        first.source,
    )


def _preferred(candidates: Sequence[tuple[Score, ...]]) -> tuple[Score, ...]:
    """Of several products added up (content and position), the one between two streams of content."""
    given = [c for c in candidates if c]
    content = [c for c in given if all(all(n.origins for n in s.operands) for s in c)]
    return (content or given)[0]


def _dropout(name: str, args: Any, kwargs: Any) -> tuple[float, bool]:
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", args[2] if len(args) > 2 else name.startswith("bernoulli") or True)
    return (float(p) if isinstance(p, (int, float)) else 0.5), bool(training)


def _without_dispatch(func: Any) -> Callable[..., Any]:
    """The same Python function, whose question whether to dispatch is answered no: its inner calls are then seen."""
    scope = {**func.__globals__, "has_torch_function": lambda *_: False}
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_OPAQUE = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


@contextlib.contextmanager
def _fast_paths(tracer: Tracer) -> Iterator[None]:
    """torch's encoder layers take one opaque native call when nothing watches, and another path under a mode.

    The model's own output comes from the native call, made with the mode off; the same call is then run a second time
    under the mode, only to be looked at.
    """
    originals = {cls: cls.forward for cls in _OPAQUE}
    inside = [False]

    def wrap(original: Any) -> Any:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            watched = any(t.requires_grad for t in [*module.parameters(), *tensors_in([*args, *kwargs.values()])])
            if inside[0] or module.training or (torch.is_grad_enabled() and watched):
                return original(module, *args, **kwargs)
            inside[0] = True
            try:
                with torch._C.DisableTorchFunction():
                    output = original(module, *args, **kwargs)
                seen = len(tracer.calls)
                with torch.random.fork_rng(devices=[]):
                    shadow = original(module, *args, **kwargs)
                if any(c.key in tracer.settings.edits for c in tracer.calls[seen:]):
                    return shadow
                tracer.adopt(output, shadow)
                return output
            finally:
                inside[0] = False

        return forward

    for cls, original in originals.items():
        setattr(cls, "forward", wrap(original))  # noqa: B010
    try:
        yield
    finally:
        for cls, original in originals.items():
            setattr(cls, "forward", original)  # noqa: B010


@contextlib.contextmanager
def tracing(root: object, arguments: Mapping[str, Any], settings: Settings | None = None) -> Iterator[Tracer]:
    """Trace everything that runs inside; the tracer's `sites()` tells what was found."""
    tracer = Tracer(root, arguments, settings or Settings())
    from intently.sites.flex import watching_flex
    from intently.sites.scripted import watching_scripted

    watching = watching_flex(tracer), watching_scripted(tracer)
    with _fast_paths(tracer), watching[0], watching[1], torch.compiler.set_stance("force_eager"), tracer:
        yield tracer


__all__ = ["Edit", "F", "Pending", "Score", "Settings", "Sizes", "Tracer", "tracing"]
