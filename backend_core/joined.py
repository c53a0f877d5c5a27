"""Joined blocks: the accelerated parts of a known block as few primitives, instead of one each.

A decoder layer becomes two programs (:mod:`.program`) around the cache and the attention function of the host, which
are called as the host's own code would call them: one program from the layer's input to queries, keys and values, and
one from attention's result to the layer's result. The kernels and their order are those of the separate layers, so the
bits are the same; what is saved is nodes, views, scheduling and Python.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import install, native
from .integrations import scope
from .offers import Offer
from .program import Program, Value, is_bound
from .sites import JoinSite, OpSite
from .walk import Found, host_of, model_type_of, stock_class
from .walk_blocks import AttentionForm, Form, LayerForm, MLPForm, find_blocks, form_of

#: A kernel of one part, by its dtypes: (kernel, result dtype).
Part = tuple[Any, str]


class Unjoinable(Exception):
    """A block stays in separate parts; the message says why."""


class Parts:
    """What the parts of one block run for one range of rows.

    small
        True for rows 1..16.
    helper
        ``helper(op, variant, width, dtype)`` -> a kernel that belongs to no module, or None.
    """

    def __init__(self, small: bool, helper: Callable[[str, str, int, str], Any]) -> None:
        self.small, self.helper = small, helper

    def layer(self, module: Any, dtype: str) -> Part:
        """The kernel of an accelerated layer for input of a dtype. Raises Unjoinable."""
        slot = install.slot_of(module)
        if slot is None or slot.probe is None:
            raise Unjoinable(f"{type(module).__name__} runs stock")
        function = slot.small if self.small else slot.large
        site = slot.probe.site
        if not is_bound(function):
            raise Unjoinable(f"{site.path} is not a single kernel")
        if site.x_dtype != dtype:
            raise Unjoinable(f"{site.path} was chosen for {site.x_dtype}, not {dtype}")
        return function, site.out_dtype

    def rope(self, module: Any, dtype: str) -> tuple[Any, int] | None:
        """(kernel, second parameter) of rotary positions, None if they are turned separately."""
        slot = install.slot_of(module) if isinstance(module, dict) else None
        if slot is None or slot.probe is None or slot.probe.site.x_dtype != dtype:
            return None
        function: Any = slot.small
        turn = getattr(function, "turn", None)
        return (turn, function.way) if is_bound(turn) else None

    def free(self, op: str, variant: str, width: int, dtype: str) -> Any:
        kernel = self.helper(op, variant, width, dtype)
        if not is_bound(kernel):
            raise Unjoinable(f"there is no kernel for {op} {variant} in {dtype}".replace("  ", " "))
        return kernel


class Joined:
    """A joined block: called with the block's module and arguments; NotImplemented leaves the call to its parts.

    It holds no reference to the module it is installed on, which would keep the module alive for ever.
    """

    def __init__(self, module: Any, form: Form, width: int, dtype: str) -> None:
        import mlx.core as mx

        self.form, self.width, self.dtype = form, width, getattr(mx, dtype)
        self.small: Any = None
        self.large: Any = None
        self.guard = native.get().Guard(*_links(module, form))
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
        self.decode: Any = None  # the whole layer for one token, with its cache
        self.scale: float = 0.0
        self.cache_class: Any = None
        self.update: Any = None
        self.attend: Any = None
        self.cached: Any = None  # dtype of the cache
        self.attended: Any = None  # dtype of attention's result
        self.kv_heads = self.kv_width = 0

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
        h = x + out
        return h + module[self.form.mlp](module[self.form.second](h))

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
    width, dtype = _input(module, form)
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
        f"{slot.probe.site.signature}" for part in _children(module, form)
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

    found = []
    for path, module, form in find_blocks(model, layers, done):
        try:
            made, site = offer(module, form, helper, id(model))
        except Unjoinable:
            continue
        site = dataclasses.replace(site, path=path, host=host_of(model), model_type=model_type_of(model),
                                   device=session.device)  # fmt: skip
        found.append(Found(site, module, offer=made))
    return found


def inner(module: Any) -> set[int]:
    """ids of the blocks inside a layer."""
    form = form_of(stock_class(module))
    return {id(module[form.attention]), id(module[form.mlp])} if isinstance(form, LayerForm) else set()


def _programs(plan: Any, module: Any, form: Form, parts: Parts, dtype: str) -> str:
    """Make the programs of one range of rows; the block's result dtype."""
    made: Any
    if isinstance(form, MLPForm):
        p = Program("accel/mlp", 1)
        y, out = _mlp(p, p.input(0), module, form, parts, dtype)
        made = p.build(y)
    elif isinstance(form, AttentionForm):
        p = Program("accel/qkv", 1)
        before = _queries_keys_values(p, p.input(0), module, form, parts, dtype, plan)
        p = Program("accel/out", 1)
        kernel, out = parts.layer(module.o_proj, before[1])
        made = before[0], p.build(p.call(kernel, p.input(0).swap().merge()))
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
    attention, inner, _ = _inner(module, form)
    p = Program("accel/layer_in", 1)
    kernel, normed = parts.layer(module[form.first], dtype)
    before, attended = _queries_keys_values(p, p.call(kernel, p.input(0)), attention, inner, parts, normed, plan)
    p = Program("accel/layer_out", 2)
    y = _after_attention(p, p.input(0), p.input(1), module, form, parts, dtype, attended)
    return (before, p.build(y)), dtype


def _inner(module: Any, form: LayerForm) -> tuple[Any, AttentionForm, MLPForm]:
    attention = module[form.attention]
    inner, mlp = form_of(stock_class(attention)), form_of(stock_class(module[form.mlp]))
    if not isinstance(inner, AttentionForm) or not isinstance(mlp, MLPForm):
        raise Unjoinable("its attention or feed-forward block is not a known one")
    return attention, inner, mlp


def _after_attention(p: Program, attended: Value, x: Value, module: Any, form: LayerForm, parts: Parts, dtype: str,
                     attended_dtype: str) -> Value:  # fmt: skip
    """The layer's result from attention's result (batch, heads, rows, features) and the layer's input."""
    attention, _, mlp = _inner(module, form)
    add = parts.free("residual", "", _input(module, form)[0], dtype)
    kernel, out = parts.layer(attention.o_proj, attended_dtype)
    if out != dtype:
        raise Unjoinable(f"attention's result is {out}, the layer's input {dtype}")
    h = p.call(add, x, p.call(kernel, attended.swap().merge()))
    kernel, normed = parts.layer(module[form.second], dtype)
    y, out = _mlp(p, p.call(kernel, h), module[form.mlp], mlp, parts, normed)
    if out != dtype:
        raise Unjoinable(f"the feed-forward result is {out}, the layer's input {dtype}")
    return p.call(add, h, y)


def _whole(plan: Any, module: Any, form: Form, helper: Any, dtype: str, owner: int) -> str:
    """Make the program of a whole layer for one token, if cache and attention are kernels too; the cache's dtype."""
    from .integrations import attention as attentions
    from .integrations import cache as caches

    if not isinstance(form, LayerForm) or plan.way is None:
        return ""
    attention, inner, _ = _inner(module, form)
    host = stock_class(attention).__module__.partition(".")[0]
    heads, width = plan.kv_heads, plan.kv_width
    plan.cached = caches._dtypes.get((owner, heads, width, width), plan.attended)
    name = str(plan.cached).rpartition(".")[2]
    shape = (owner, host, getattr(attention, inner.heads), heads, width, width)
    entry = attentions._table.get((*shape, plan.attended, plan.cached, plan.cached, False))
    kernel_of = getattr(entry[0] if entry else None, "kernel", None)
    write = getattr(caches._updates.get((owner, plan.attended, plan.cached)), "kernel", None)
    if kernel_of is None or not is_bound(write) or _features(attention["v_proj"]) != heads * width:
        return name
    parts = Parts(True, helper)
    p = Program("accel/layer", 3)
    kernel, normed = parts.layer(module[form.first], dtype)
    x = p.call(kernel, p.input(0))
    (queries, keys, values), attended = _parts_of_attention(p, x, attention, inner, parts, normed, plan)
    buffers = p.call(write, p.input(1), p.input(2), keys, values, call_params=True)
    out = p.call(kernel_of(attention.scale), queries, buffers.limit(2), buffers.other(1).limit(2))
    y = _after_attention(p, out, p.input(0), module, form, parts, dtype, attended)
    plan.decode = p.build(y, buffers, buffers.other(1))
    plan.scale = attention.scale
    plan.cache_class = sys.modules[f"{host}.models.cache"].KVCache
    plan.update, plan.attend = plan.cache_class.update_and_fetch, plan.names["scaled_dot_product_attention"]
    return name


def _queries_keys_values(p: Program, x: Value, module: Any, form: AttentionForm, parts: Parts, dtype: str,
                         plan: Any) -> tuple[Any, str]:  # fmt: skip
    """(program that makes queries, keys and values, the dtype of attention's result)."""
    made, attended = _parts_of_attention(p, x, module, form, parts, dtype, plan)
    return p.build(*made), attended


def _parts_of_attention(p: Program, x: Value, module: Any, form: AttentionForm, parts: Parts, dtype: str,
                        plan: Any) -> tuple[list[Value], str]:  # fmt: skip
    """([queries, keys, values], the dtype of attention's result)."""
    import mlx.core as mx

    heads, kv_heads = getattr(module, form.heads), getattr(module, form.kv_heads)
    made: list[Value] = []
    dtypes = []
    for name, count, norm in (("q_proj", heads, "q_norm"), ("k_proj", kv_heads, "k_norm"), ("v_proj", kv_heads, "")):
        kernel, out = parts.layer(module[name], dtype)
        value = p.call(kernel, x).split(count)
        if form.norms and norm:
            kernel, out = parts.layer(module[norm], out)
            value = p.call(kernel, value)
        made.append(value.swap())
        dtypes.append(out)
    plan.kv_heads, plan.kv_width = kv_heads, _features(module["k_proj"]) // kv_heads
    turn = parts.rope(module.rope, dtypes[0]) if dtypes[0] == dtypes[1] else None
    if turn is not None:
        made[:2] = (p.call(turn[0], value, call_params=True) for value in made[:2])
    plan.way = turn[1] if turn is not None else None
    plan.attended = getattr(mx, dtypes[0])
    names = plan.names
    host = stock_class(module).__module__.partition(".")[0]
    base = sys.modules.get(f"{host}.models.base")
    if names.get("scaled_dot_product_attention") is not getattr(base, "scaled_dot_product_attention", base):
        raise Unjoinable("it calls another attention function than its host's")
    return made, dtypes[0]


def _mlp(p: Program, x: Value, module: Any, form: MLPForm, parts: Parts, dtype: str) -> tuple[Value, str]:
    from .integrations import functions

    cls = stock_class(module)
    function: Any = vars(cls)["__call__"]
    host = cls.__module__.partition(".")[0]
    swiglu = function.__globals__.get("swiglu")
    if getattr(swiglu, "stock", swiglu) is not functions.stock_function(host, "swiglu()"):
        raise Unjoinable("it calls another swiglu than its host's")
    gate, out = parts.layer(module[form.gate], dtype)
    up, other = parts.layer(module[form.up], dtype)
    if out != other:
        raise Unjoinable("gate and up have different dtypes")
    kernel = parts.free("activation", "swiglu", _features(module[form.gate]), out)
    h = p.call(kernel, p.call(gate, x), p.call(up, x))
    down, result = parts.layer(module[form.down], out)
    return p.call(down, h), result


def _features(layer: Any) -> int:
    """Output features of an accelerated layer."""
    slot = install.slot_of(layer)
    assert slot is not None and slot.probe is not None
    return int(slot.probe.site.n)


def _input(module: Any, form: Form) -> tuple[int, str]:
    """Width and dtype of a block's input, as its first part was chosen for."""
    first = module[form.first] if isinstance(form, LayerForm) else _children(module, form)[0]
    slot = install.slot_of(first) if first is not None else None
    if slot is None or slot.probe is None:
        raise Unjoinable("its first layer runs stock")
    return slot.probe.row_elements, slot.probe.site.x_dtype


def _children(module: Any, form: Form) -> list[Any]:
    """The layers of a block, in order."""
    if isinstance(form, MLPForm):
        return [module.get(name) for name in (form.gate, form.up, form.down)]
    if isinstance(form, AttentionForm):
        names = ["q_proj", "k_proj", "v_proj", "o_proj", *(("q_norm", "k_norm") if form.norms else ())]
        rope = module.get("rope")
        return [module.get(name) for name in names] + ([rope] if rope is not None else [])
    parts = [module.get(form.first), module.get(form.second)]
    for name in (form.attention, form.mlp):
        inner = form_of(stock_class(module[name]))
        parts += _children(module[name], inner) if inner is not None else []
    return parts


def _links(module: Any, form: Form) -> tuple[list[tuple[Any, str, Any]], list[tuple[Any, Any]]]:
    """What must stay as it is: (holder or None for the block itself, key, object), and (snapshot, layer)."""
    links: list[tuple[Any, str, Any]] = []
    arrays: list[tuple[Any, Any]] = []

    def block(holder: Any, owner: Any, form: Form) -> None:
        names: Sequence[str]
        if isinstance(form, LayerForm):
            names = (form.first, form.second)
            for name in (form.attention, form.mlp):
                inner = form_of(stock_class(holder[name]))
                links.append((owner, name, holder[name]))
                if inner is not None:
                    block(holder[name], holder[name], inner)
        elif isinstance(form, MLPForm):
            names = (form.gate, form.up, form.down)
        else:
            names = ("q_proj", "k_proj", "v_proj", "o_proj", "rope", *(("q_norm", "k_norm") if form.norms else ()))
        for name in names:
            part = holder.get(name)
            if part is None:
                raise Unjoinable(f"it has no {name}")
            links.append((owner, name, part))
            slot = install.slot_of(part)
            if slot is not None:
                links.append((part.__dict__, install.KEY, slot))
                arrays.append((slot.snapshot, part))

    block(module, None, form)
    return links, arrays
