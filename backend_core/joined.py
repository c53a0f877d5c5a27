"""Joined blocks: the accelerated parts of a known block as few primitives, instead of one each.

A decoder layer becomes two programs (:mod:`.program`) around the cache and the attention function of the host, which
are called as the host's own code would call them: one program from the layer's input to queries, keys and values, and
one from attention's result to the layer's result. The kernels and their order are those of the separate layers, so the
bits are the same; what is saved is nodes, views, scheduling and Python.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from . import install, native
from .integrations import scope
from .joined_steps import (
    Parts,
    Unjoinable,
    after_attention,
    blocks_in,
    children,
    features,
    feed_forward,
    input_of,
    links,
    normed,
    queries_keys_values,
)
from .offers import Offer
from .program import Program, Value, is_bound
from .sites import JoinSite, OpSite
from .walk import Found, host_of, model_type_of, stock_class
from .walk_blocks import AttentionForm, Form, LayerForm, MLPForm, find_blocks, form_of


class Joined:
    """A joined block: called with the block's module and arguments; NotImplemented leaves the call to its parts.

    It holds no reference to the module it is installed on, which would keep the module alive for ever.
    """

    def __init__(self, module: Any, form: Form, width: int, dtype: str) -> None:
        import mlx.core as mx

        self.form, self.width, self.dtype = form, width, getattr(mx, dtype)
        self.small: Any = None
        self.large: Any = None
        self.guard = native.get().Guard(*links(module, form))
        # A name looked up once per call: the native module is there, or there would be no guard.
        self.traced = native.get().in_tracing

    def ready(self, module: Any, x: Any) -> Any:
        """The programs for a call, None if its parts must run."""
        shape = x.shape
        if len(shape) != 3 or shape[2] != self.width or x.dtype != self.dtype:
            return None
        rows = shape[0] * shape[1]
        programs = self.small if rows <= 16 else self.large
        if programs is None or not rows or self.traced(x) or not self.guard.holds(module):
            return None
        return programs


class JoinedMLP(Joined):
    def __call__(self, module: Any, x: Any) -> Any:
        run = self.ready(module, x)
        return NotImplemented if run is None else run(x)


class JoinedAttention(Joined):
    """An attention block, or the layer around one."""

    def __init__(self, module: Any, form: Form, width: int, dtype: str) -> None:
        super().__init__(module, form, width, dtype)
        block = module[form.attention] if isinstance(form, LayerForm) else module
        function: Any = vars(stock_class(block))["__call__"]
        self.names = function.__globals__
        self.way: int | None = None  # None: positions are turned separately
        self.fused: tuple[int, int] | None = None  # where values are in what `before` gives for them
        self.decode: Any = None  # the whole layer for one token, with its cache
        self.scale: float = 0.0
        self.cache_class: Any = None
        self.update: Any = None
        self.attend: Any = None
        self.cached: Any = None  # dtype of the cache
        self.attended: Any = None  # dtype of attention's result
        self.kv_heads = self.kv_width = 0
        self.write: Any = None  # kernels of the whole layer: what puts keys and values into the cache, and attention
        self.attention: Any = None

    def __call__(self, module: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        programs = self.ready(module, x)
        if programs is None:
            return NotImplemented
        offset = 0 if cache is None else cache.offset
        if type(offset) is not int:
            return NotImplemented
        block = module[self.form.attention] if type(self.form) is LayerForm else module
        if self.decode is not None and mask is None and type(cache) is self.cache_class and x.shape[1] == 1:
            held, values = cache.keys, cache.values
            if held is not None and block.scale == self.scale and self.fits(held, values, x.shape[0], offset):
                y, cache.keys, cache.values = self.decode(x, held, values, params=(offset, self.way, offset + 1))
                cache.offset = offset + 1
                return y
        before, after = programs
        if self.way is not None:
            queries, keys, values = before(x, params=(offset, self.way))
            if self.fused is not None:
                values = values[..., self.fused[0] : self.fused[1]]
                values = values.reshape(*x.shape[:2], self.kv_heads, -1).transpose(0, 2, 1, 3)
        else:
            queries, keys, values = before(x)
            turn = block.rope
            queries = turn(queries) if cache is None else turn(queries, offset=offset)
            keys = turn(keys) if cache is None else turn(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        attend = self.names["scaled_dot_product_attention"]
        out = attend(queries, keys, values, cache=cache, scale=block.scale, mask=mask)
        if out.dtype == self.attended:
            return after(out, x) if type(self.form) is LayerForm else after(out)
        out = block.o_proj(out.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[1], -1))
        if type(self.form) is not LayerForm:
            return out
        return self.rest(module, x, out)

    def rest(self, module: Any, x: Any, r: Any) -> Any:
        """A layer's result from its input and the attention block's result, in parts."""
        form: Any = self.form

        def norm(name: str, v: Any) -> Any:
            return module[name](v) if name else v

        h = x + norm(form.after_attention, r)
        return h + norm(form.after_mlp, module[form.mlp](norm(form.second, h)))

    def fits(self, keys: Any, values: Any, batch: int, offset: int) -> bool:
        """Whether a cache has room for a token and the form that the whole layer's program needs."""
        length = keys.shape[2]
        return (
            0 <= offset < length
            and keys.shape == (batch, self.kv_heads, length, self.kv_width)
            and values.shape == (batch, self.kv_heads, length, self.kv_width)
            and keys.dtype == self.cached
            and values.dtype == self.cached
            and not self.traced()
            # Whoever has put functions of their own there wants them called.
            and self.cache_class.update_and_fetch is self.update
            and self.names["scaled_dot_product_attention"] is self.attend
        )


def offer(module: Any, form: Form, helper: Callable[[str, str, int, str], Any], owner: int) -> tuple[Offer, JoinSite]:
    """The core's offer for a block, and the facts of its site. Raises Unjoinable."""
    width, dtype = input_of(module, form)
    plan = JoinedMLP(module, form, width, dtype) if isinstance(form, MLPForm) else JoinedAttention(
        module, form, width, dtype)  # fmt: skip
    out = _programs(plan, module, form, Parts(True, helper), dtype)
    hi: int | None = None
    try:
        _programs(plan, module, form, Parts(False, helper), dtype)
    except Unjoinable:
        hi = 16
    kind = {MLPForm: "mlp", AttentionForm: "attention", LayerForm: "layer"}[type(form)]
    parts = tuple(
        f"{slot.probe.site.signature}" for part in children(module, form)
        if (slot := install.slot_of(part)) is not None and slot.probe is not None
    )  # fmt: skip
    kv_heads = getattr(plan, "kv_heads", 0)
    site = JoinSite(
        path="",
        kind=kind,
        width=width,
        parts=parts,
        x_dtype=dtype,
        out_dtype=out,
        kv_heads=kv_heads,
        head_dim=getattr(plan, "kv_width", 0),
        cached=_whole(plan, module, form, helper, dtype, owner),
    )

    def build(module: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            token = scope.owner.set(owner)
            try:
                return plan(module, *args)
            finally:
                scope.owner.reset(token)

        call.plan = plan  # type: ignore[attr-defined]
        return call

    return Offer("joined", build, rows=(1, hi), row_invariant=True, plugin="core", preference=1), site


def find(model: Any, session: Any, layers: bool, done: set[int]) -> list[Found]:
    """Sites of blocks that can be joined, with the core's offers; what cannot be is no site.

    session: the selection that is running; layers and done as for :func:`.walk_blocks.find_blocks`.
    """
    if session.device != "cpu" or not native.available():
        return []
    helper = free_kernels(session)
    found = []
    for path, module, form in find_blocks(model, layers, done):
        try:
            made, site = offer(module, form, helper, id(model))
        except Unjoinable as reason:
            if layers:
                session.report.unjoined.setdefault(str(reason), []).append(path)
            continue
        site = dataclasses.replace(site, path=path, host=host_of(model), model_type=model_type_of(model),
                                   device=session.device)  # fmt: skip
        found.append(Found(site, module, offer=made))
    return found


def free_kernels(session: Any) -> Callable[[str, str, int, str], Any]:
    """``helper`` of :class:`.joined_steps.Parts` for a selection."""
    kernels: dict[tuple[str, str, int, str], Any] = {}

    def helper(op: str, variant: str, width: int, dtype: str) -> Any:
        key = (op, variant, width, dtype)
        if key not in kernels:
            kernels[key] = None
            site = OpSite(path=f"{variant or op}()", op=op, variant=variant, dims=width, x_dtype=dtype, out_dtype=dtype)
            for made in session.host.collect(site)[0]:
                function = made.build(None) if made.exactness != "lossy" and made.row_invariant else None
                if is_bound(function):
                    kernels[key] = function
                    break
        return kernels[key]

    return helper


def inner(module: Any) -> set[int]:
    """ids of the blocks inside a layer."""
    form = form_of(stock_class(module))
    return {id(module[form.attention]), id(module[form.mlp])} if isinstance(form, LayerForm) else set()


def _programs(plan: Any, module: Any, form: Form, parts: Parts, dtype: str) -> str:
    """Make the programs of one range of rows; the block's result dtype."""
    made: Any
    if isinstance(form, MLPForm):
        p = Program("accel/mlp", 1)
        y, out = feed_forward(p, p.input(0), module, form, parts, dtype)
        made = p.build(y)
    elif isinstance(form, AttentionForm):
        p = Program("accel/qkv", 1)
        _, results, attended = queries_keys_values(p, p.input(0), module, form, parts, dtype, plan)
        before = p.build(*results)
        p = Program("accel/out", 1)
        kernel, out = parts.layer(module.o_proj, attended)
        made = before, p.build(p.call(kernel, p.input(0).swap().merge()))
    else:
        made, out = _layer(module, form, parts, dtype, plan)
    if out != dtype and isinstance(form, LayerForm):
        raise Unjoinable(f"its result is {out}, its input {dtype}")
    if parts.small:
        plan.small = made
    else:
        plan.large = made
    return out


def _layer(module: Any, form: LayerForm, parts: Parts, dtype: str, plan: Any) -> tuple[Any, str]:
    attention, inner, _ = blocks_in(module, form)
    p = Program("accel/layer_in", 1)
    x, first = normed(p, p.input(0), module, form.first, parts, dtype)
    _, results, attended = queries_keys_values(p, x, attention, inner, parts, first, plan)
    before = p.build(*results)
    p = Program("accel/layer_out", 2)
    y = after_attention(p, p.input(0), p.input(1), module, form, parts, dtype, attended)
    return (before, p.build(y)), dtype


def _whole(plan: Any, module: Any, form: Form, helper: Any, dtype: str, owner: int) -> str:
    """Make the program of a whole layer for one token, if cache and attention are kernels too; the cache's dtype."""
    from .integrations import attention as attentions
    from .integrations import cache as caches

    if not isinstance(form, LayerForm) or plan.way is None:
        return ""
    attention, inner, _ = blocks_in(module, form)
    host = stock_class(attention).__module__.partition(".")[0]
    heads, width = plan.kv_heads, plan.kv_width
    plan.cached = caches._dtypes.get((owner, heads, width, width), plan.attended)
    name = str(plan.cached).rpartition(".")[2]
    shape = (owner, host, getattr(attention, inner.heads), heads, width, width)
    entry = attentions._table.get((*shape, plan.attended, plan.cached, plan.cached, False))
    kernel_of = getattr(entry[0] if entry else None, "kernel", None)
    write = getattr(caches._updates.get((owner, plan.attended, plan.cached)), "kernel", None)
    if kernel_of is None or not is_bound(write) or (not inner.fused and features(attention["v_proj"]) != heads * width):
        return name
    plan.write, plan.attention = write, kernel_of(attention.scale)
    p = Program("accel/layer", 3)
    plan.decode = p.build(*whole_layer(p, p.input(0), p.input(1), p.input(2), module, plan, Parts(True, helper), dtype))
    plan.scale = attention.scale
    plan.cache_class = sys.modules[f"{host}.models.cache"].KVCache
    plan.update, plan.attend = plan.cache_class.update_and_fetch, plan.names["scaled_dot_product_attention"]
    return name


def whole_layer(p: Program, x: Value, keys: Value, values: Value, module: Any, plan: JoinedAttention, parts: Parts,
                dtype: str) -> tuple[Value, Value, Value]:  # fmt: skip
    """(result, keys, values) of a layer for one token with its cache; the program's params are those of `decode`."""
    form: Any = plan.form
    attention, inner, _ = blocks_in(module, form)
    y, first = normed(p, x, module, form.first, parts, dtype)
    (queries, new_keys, new_values), _, attended = queries_keys_values(p, y, attention, inner, parts, first, plan)
    buffers = p.call(plan.write, keys, values, new_keys, new_values, call_params=True)
    out = p.call(plan.attention, queries, buffers.limit(2), buffers.other(1).limit(2))
    y = after_attention(p, out, x, module, form, parts, dtype, attended)
    return y, buffers, buffers.other(1)
