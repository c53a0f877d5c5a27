"""Joined stacks: from tokens to the norm behind the last layer as few primitives, for one token per sequence.

Where every layer is one program for a token with its cache (:mod:`.joined`), and the code that loops over the layers is
a known one, the steps of several layers are put into one program. The kernels and their order are those of the layers;
what is saved is primitives, their scheduling and their Python. The layers keep their own programs, which serve every
other call: prompts, several tokens of a sequence, caches of other kinds.

The caches of a token are 60 arrays in a model of 30 layers, and what mlx does with them as inputs and outputs of graph
nodes costs a third of a millisecond. So the programs are evaluated at once, on caches that are changed in place
(kernels/bindings/program_at_once.cpp), as long as nobody else holds them; else they are graph nodes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from . import install, joined_pages, native
from .integrations import scope
from .joined import JoinedAttention, free_kernels, whole_layer
from .joined_steps import Parts, Unjoinable, children, links, normed
from .offers import Offer
from .program import Program, is_bound
from .sites import JoinSite, OpSite
from .verify import build
from .walk import Found, dtype_name, host_of, model_type_of, sorted_modules, stock_class
from .walk_blocks import StackForm, leaves_positions_out, stack_form_of

#: Layers in one program: every output of a primitive refers to all inputs and all other outputs.
LAYERS = 5
#: Stacks with more bytes of weights are left alone: what is saved is some hundred microseconds a token, and a race or a
#: verification is many tokens.
MOST_BYTES = 1 << 29


class JoinedStack:
    """A joined stack: called with the module and its arguments; NotImplemented leaves the call to its code.

    It holds no reference to the module it is installed on.
    """

    def __init__(self, module: Any, form: StackForm, session: Any) -> None:
        self.form = form
        layers = list(module["layers"])
        plans = [_plan_of(layer) for layer in layers]
        if not layers or sum(map(_bytes_of, layers)) > MOST_BYTES:
            raise Unjoinable("it has no layers, or so many weights that nobody would notice")
        first = self.first = plans[0]
        same = ("width", "dtype", "kv_heads", "kv_width", "cached", "cache_class", "update", "attend", "names")
        if any(getattr(p, name) is not getattr(first, name) and getattr(p, name) != getattr(first, name)
               for p in plans for name in same):  # fmt: skip
            raise Unjoinable("its layers differ in what they keep in the cache")
        ways = {p.way for p, layer in zip(plans, layers, strict=True) if not leaves_positions_out(_rope_of(layer, p))}
        if len(ways) > 1:
            raise Unjoinable("its layers differ in how they turn positions")
        self.way = ways.pop() if ways else 0
        function: Any = vars(stock_class(module))["__call__"]
        import mlx.core as mx

        self.integers = (mx.uint32, mx.int32, mx.int64)
        self.names = function.__globals__
        self.mask = self.names.get("create_attention_mask")
        self.cache_mask = first.cache_class.make_mask
        base = sys.modules[f"{stock_class(module).__module__.partition('.')[0]}.models.base"]
        if self.mask is not base.create_attention_mask:
            raise Unjoinable("it makes its mask in another way than its host")
        if first.cache_class().make_mask(1, return_array=False, window_size=None) is not None:
            raise Unjoinable("a single token gets a mask")
        self.lookup = _lookup(module[form.embedding], dtype_name(first.dtype), first.width, session)
        self.programs = self._programs(module, layers, plans, free_kernels(session))
        self.count = len(layers)
        self.guard = native.get().Guard(*_links(module, layers, form), [("layers", layers)])
        self.at_once, self.move = native.get().run_at_once, native.get().move_caches
        self.traced, self.take, self.put = native.get().in_tracing, native.get().take_caches, native.get().put_caches

    def _programs(self, module: Any, layers: list[Any], plans: list[JoinedAttention], helper: Any) -> list[Any]:
        """Programs of LAYERS layers each, the last one of what is left."""
        dtype = dtype_name(self.first.dtype)
        parts = Parts(True, helper)
        programs = []
        for begin in range(0, len(layers), LAYERS):
            some = list(zip(layers, plans, strict=True))[begin : begin + LAYERS]
            p = Program("accel/stack", 1 + 2 * len(some))
            x, buffers = p.input(0), []
            if begin == 0 and self.lookup is not None:
                x = p.call(self.lookup, x)
            for i, (layer, plan) in enumerate(some):
                x, keys, values = whole_layer(p, x, p.input(1 + 2 * i), p.input(2 + 2 * i), layer, plan, parts, dtype)
                buffers += [keys, values]
            if begin + LAYERS >= len(layers):
                x, self.out = normed(p, x, module, self.form.norm, parts, dtype)
            programs.append(p.build(x, *buffers))
        return programs

    def __call__(self, module: Any, inputs: Any, cache: Any = None, input_embeddings: Any = None) -> Any:
        shape = inputs.shape
        if len(shape) != 2 or shape[1] != 1 or not 0 < shape[0] <= 16 or input_embeddings is not None:
            return NotImplemented
        first = self.first
        if (
            type(cache) is not list
            or len(cache) != self.count
            or not all(getattr(module, name) == value for name, value in self.form.attributes)
            # Whoever has put functions of their own there wants them called.
            or self.names["create_attention_mask"] is not self.mask
            or first.names["scaled_dot_product_attention"] is not first.attend
            or first.cache_class.update_and_fetch is not first.update
            or first.cache_class.make_mask is not self.cache_mask
            or self.traced()
            or not self.guard.holds(module)
        ):
            return NotImplemented
        taken = self.take(cache, first.cache_class, shape[0], first.kv_heads, first.kv_width, first.cached)
        if taken is None:
            return NotImplemented
        x = inputs
        if self.lookup is None:
            x = module[self.form.embedding](inputs)
            if x.dtype != first.dtype or x.shape[-1] != first.width:
                return NotImplemented
        elif x.dtype not in self.integers:
            return NotImplemented
        offset, arrays = taken
        params, end = (offset, self.way, offset + 1), offset + 1
        done = self.at_once(self.programs, x, arrays, params)
        if done is not None:
            self.move(cache, end)
            return done
        for begin, program in zip(range(0, self.count, LAYERS), self.programs, strict=True):
            out = program(x, *arrays[2 * begin : 2 * (begin + LAYERS)], params=params)
            self.put(cache, begin, out, end)
            x = out[0]
        return x


def find(model: Any, session: Any) -> list[Found]:
    """The site of the model's stack with the core's offer, once its layers are joined; none if it cannot be."""
    if session.device != "cpu" or not native.available() or not host_of(model):
        return []
    from mlx.utils import tree_flatten

    paths = {d.site.path: d.site.signature for d in session.report.decisions if isinstance(d.site, JoinSite)}
    sites = {id(module): paths[path] for path, module in sorted_modules(model) if path in paths}
    found = []
    for path, module in sorted_modules(model):
        form = stack_form_of(stock_class(module))
        if form is None:
            continue
        try:
            plan = JoinedStack(module, form, session)
        except Unjoinable as reason:
            session.report.unjoined.setdefault(f"not as one: {reason}", []).append(path)
            continue
        first = plan.first
        site = JoinSite(
            path=path, host=host_of(model), model_type=model_type_of(model), device=session.device, kind="stack",
            width=first.width, kv_heads=first.kv_heads, head_dim=first.kv_width, cached=dtype_name(first.cached),
            parts=tuple(sites.get(id(layer), "") for layer in module["layers"]), x_dtype=dtype_name(first.dtype),
            out_dtype=plan.out,
        )  # fmt: skip
        found.append(Found(site, module, offer=_offer(plan, id(model))))
    if found:
        flat: Any = tree_flatten(model.parameters())
        arrays = [a for _, a in flat]
        if sum(a.nbytes for a in arrays) <= MOST_BYTES:
            joined_pages.collapse(arrays)
    return found


def _offer(plan: JoinedStack, owner: int) -> Offer:
    def build(module: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            token = scope.owner.set(owner)
            try:
                return plan(module, *args)
            finally:
                scope.owner.reset(token)

        call.plan = plan  # type: ignore[attr-defined]
        return call

    return Offer("joined", build, rows=(1, 16), row_invariant=True, plugin="core", preference=1, lighter=True)


def _plan_of(layer: Any) -> JoinedAttention:
    """The joined form of a layer that is one program for a token. Raises Unjoinable."""
    entry = layer.__dict__.get(scope._JOINED) if isinstance(layer, dict) else None
    plan = entry[0] if entry is not None else None
    if isinstance(plan, JoinedAttention) and plan.decode is not None and plan.small is not None:
        return plan
    raise Unjoinable("not every layer is one operation for a token")


def _bytes_of(layer: Any) -> int:
    """Bytes of a layer's weights, but for norms."""
    slots = [install.slot_of(part) for part in children(layer, _plan_of(layer).form)]
    return sum(getattr(slot.probe.site, "weight_bytes", 0) for slot in slots if slot is not None and slot.probe)


def _rope_of(layer: Any, plan: JoinedAttention) -> type:
    form: Any = plan.form
    return stock_class(layer[form.attention].rope)


def _lookup(embedding: Any, dtype: str, width: int, session: Any) -> Any:
    """A kernel for the rows of a quantized embedding in a dtype, None if there is none; verified with the stack."""
    import mlx.nn as nn

    scales, slot = embedding.get("scales"), install.slot_of(embedding)
    if stock_class(embedding) is not nn.QuantizedEmbedding or embedding.get("biases") is None:
        return None
    own = dtype_name(scales.dtype)
    if ("float32" if slot is not None and slot.cast else own) != dtype:
        return None
    site = OpSite(path="lookup()", op="lookup", variant=embedding.mode, dims=width, x_dtype=dtype, weight_dtype=own,
                  out_dtype=dtype, device=session.device)  # fmt: skip
    for made in session.host.collect(site)[0]:
        if made.exactness == "bitwise":
            with contextlib.suppress(Exception):
                if is_bound(kernel := build(made, embedding)):
                    return kernel
    return None


def _links(module: Any, layers: list[Any], form: StackForm) -> tuple[list[Any], list[Any]]:
    """As :func:`.joined_steps.links`, for all layers, the embedding and the norm."""
    found: list[tuple[Any, str, Any]] = []
    arrays: list[tuple[Any, Any]] = []
    for name in (form.embedding, form.norm):
        part = module[name]
        found.append((None, name, part))
        slot = install.slot_of(part)
        if slot is not None:
            found.append((part.__dict__, install.KEY, slot))
        arrays.append((native.snapshot(part), part))
    for layer in layers:
        inner: Any = _plan_of(layer).form
        inside, kept = links(layer, inner)
        found += [(layer if holder is None else holder, key, value) for holder, key, value in inside]
        arrays += kept
        attention = layer[inner.attention]
        found.append((layer.__dict__, scope._JOINED, layer.__dict__[scope._JOINED]))
        found.append((attention.__dict__, "scale", attention.__dict__.get("scale")))
    return found, arrays
