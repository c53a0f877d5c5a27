"""What the parts of known blocks run, as steps of programs (:mod:`.program`); used by :mod:`.joined`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import install
from .integrations import scope
from .program import Program, Value, is_bound
from .walk import stock_class
from .walk_blocks import AttentionForm, Form, LayerForm, MLPForm, form_of, leaves_positions_out

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


def blocks_in(module: Any, form: LayerForm) -> tuple[Any, AttentionForm, MLPForm]:
    """(attention, its form, form of the feed-forward block) of a layer. Raises Unjoinable."""
    attention = module[form.attention]
    inner, mlp = form_of(stock_class(attention)), form_of(stock_class(module[form.mlp]))
    if not isinstance(inner, AttentionForm) or not isinstance(mlp, MLPForm):
        raise Unjoinable("its attention or feed-forward block is not a known one")
    return attention, inner, mlp


def normed(p: Program, x: Value, module: Any, name: str, parts: Parts, dtype: str) -> tuple[Value, str]:
    """(x behind the norm of that name, its dtype); x itself without a name."""
    if not name:
        return x, dtype
    kernel, out = parts.layer(module[name], dtype)
    return p.call(kernel, x), out


def after_attention(p: Program, attended: Value, x: Value, module: Any, form: LayerForm, parts: Parts, dtype: str,
                    attended_dtype: str) -> Value:  # fmt: skip
    """The layer's result from attention's result (batch, heads, rows, features) and the layer's input."""
    attention, _, mlp = blocks_in(module, form)
    if form.clips and dtype == "float16":
        raise Unjoinable("its sums are clipped in float16")
    add = parts.free("residual", "", input_of(module, form)[0], dtype)
    kernel, out = parts.layer(attention.o_proj, attended_dtype)
    r, out = normed(p, p.call(kernel, attended.swap().merge()), module, form.after_attention, parts, out)
    if out != dtype:
        raise Unjoinable(f"attention's result is {out}, the layer's input {dtype}")
    h = p.call(add, x, r)
    y, out = normed(p, h, module, form.second, parts, dtype)
    y, out = feed_forward(p, y, module[form.mlp], mlp, parts, out)
    y, out = normed(p, y, module, form.after_mlp, parts, out)
    if out != dtype:
        raise Unjoinable(f"the feed-forward result is {out}, the layer's input {dtype}")
    return p.call(add, h, y)


def queries_keys_values(p: Program, x: Value, module: Any, form: AttentionForm, parts: Parts, dtype: str,
                        plan: Any) -> tuple[list[Value], list[Value], str]:  # fmt: skip
    """([queries, keys, values], the same as results of a program, the dtype of attention's result).

    A fused projection's values are no result on their own; its whole output stands for them, and `plan.fused` says
    where in it they are.
    """
    import mlx.core as mx

    heads, kv_heads = getattr(module, form.heads), getattr(module, form.kv_heads)
    made: list[Value] = []
    dtypes: list[str] = []
    whole: Value | None = None
    if form.fused:
        kernel, out = parts.layer(module["qkv_proj"], dtype)
        whole, n = p.call(kernel, x), features(module["qkv_proj"])
        width = n // (heads + 2 * kv_heads)
        ends = [0, heads * width, (heads + kv_heads) * width, n]
        if n % (heads + 2 * kv_heads) or module.head_dim != width:
            raise Unjoinable("its projection is not made of heads alone")
        counts = (heads, kv_heads, kv_heads)
        made = [whole.part(a, b).split(c).swap() for a, b, c in zip(ends, ends[1:], counts, strict=False)]
        dtypes = [out] * 3
        plan.fused, plan.kv_heads, plan.kv_width = (ends[2], n), kv_heads, width
    else:
        # Neighbours that do not depend on each other run as one.
        projected = []
        for name in ("q_proj", "k_proj", "v_proj"):
            kernel, out = parts.layer(module[name], dtype)
            projected.append((p.call(kernel, x), out))
        shapes = ((heads, "q_norm"), (kv_heads, "k_norm"), (kv_heads, ""))
        for (value, out), (count, norm) in zip(projected, shapes, strict=True):
            if form.whole_norms:
                value, out = normed(p, value, module, norm, parts, out)
            value = value.split(count)
            if form.norms:
                value, out = normed(p, value, module, norm, parts, out)
            made.append(value.swap())
            dtypes.append(out)
        plan.kv_heads, plan.kv_width = kv_heads, features(module["k_proj"]) // kv_heads
    turn = parts.rope(module.rope, dtypes[0]) if dtypes[0] == dtypes[1] else None
    still = leaves_positions_out(stock_class(module.rope))
    if turn is not None:
        made[:2] = (p.call(turn[0], value, call_params=True) for value in made[:2])
    elif not still and whole is not None:
        raise Unjoinable("its positions are turned separately")
    plan.way = turn[1] if turn is not None else 0 if still else None
    plan.attended = getattr(mx, dtypes[0])
    host = stock_class(module).__module__.partition(".")[0]
    base = sys.modules.get(f"{host}.models.base")
    if plan.names.get("scaled_dot_product_attention") is not getattr(base, "scaled_dot_product_attention", base):
        raise Unjoinable("it calls another attention function than its host's")
    return made, made if whole is None else [*made[:2], whole], dtypes[0]


def feed_forward(p: Program, x: Value, module: Any, form: MLPForm, parts: Parts, dtype: str) -> tuple[Value, str]:
    """(the block's result, its dtype)."""
    from .integrations import functions

    cls = stock_class(module)
    function: Any = vars(cls)["__call__"]
    host = cls.__module__.partition(".")[0]
    if form.activation == "swiglu":
        swiglu = function.__globals__.get("swiglu")
        if getattr(swiglu, "stock", swiglu) is not functions.stock_function(host, "swiglu()"):
            raise Unjoinable("it calls another swiglu than its host's")
    elif scope.gated_of(module) is None:
        raise Unjoinable("its activation runs stock")
    kernel, out = parts.layer(module[form.gate], dtype)
    gate, width = p.call(kernel, x), features(module[form.gate])
    if form.up:
        kernel, other = parts.layer(module[form.up], dtype)
        up = p.call(kernel, x)
        if out != other:
            raise Unjoinable("gate and up have different dtypes")
    else:
        width //= 2
        gate, up = gate.part(0, width), gate.part(width, 2 * width)
    h = p.call(parts.free("activation", form.activation, width, out), gate, up)
    kernel, result = parts.layer(module[form.down], out)
    return p.call(kernel, h), result


def features(layer: Any) -> int:
    """Output features of an accelerated layer."""
    slot = install.slot_of(layer)
    assert slot is not None and slot.probe is not None
    return int(slot.probe.site.n)


def input_of(module: Any, form: Form) -> tuple[int, str]:
    """Width and dtype of a block's input, as its first part was chosen for."""
    first = children(module, form)[0]
    slot = install.slot_of(first) if first is not None else None
    if slot is None or slot.probe is None:
        raise Unjoinable("its first layer runs stock")
    return slot.probe.row_elements, slot.probe.site.x_dtype


def children(module: Any, form: Form) -> list[Any]:
    """The layers of a block, in order."""
    parts = [module.get(name) for name in form.layers]
    if isinstance(form, AttentionForm):
        rope = module.get("rope")
        return parts + ([rope] if rope is not None else [])
    if isinstance(form, LayerForm):
        inner = [children(module[name], known) for name in (form.attention, form.mlp)
                 if (known := form_of(stock_class(module[name]))) is not None]  # fmt: skip
        below = [part for layers in inner for part in layers]
        return parts + below if form.first else below + parts
    return parts


def links(module: Any, form: Form) -> tuple[list[tuple[Any, str, Any]], list[tuple[Any, Any]]]:
    """What must stay as it is: (holder or None for the block itself, key, object), and (snapshot, layer)."""
    found: list[tuple[Any, str, Any]] = []
    arrays: list[tuple[Any, Any]] = []

    def block(holder: Any, owner: Any, form: Form) -> None:
        names = form.layers
        if isinstance(form, LayerForm):
            for name in (form.attention, form.mlp):
                inner = form_of(stock_class(holder[name]))
                found.append((owner, name, holder[name]))
                if inner is not None:
                    block(holder[name], holder[name], inner)
        elif isinstance(form, AttentionForm):
            names = (*names, "rope")
        for name in names:
            part = holder.get(name)
            if part is None:
                raise Unjoinable(f"it has no {name}")
            found.append((owner, name, part))
            slot = install.slot_of(part)
            if slot is not None:
                found.append((part.__dict__, install.KEY, slot))
                arrays.append((slot.snapshot, part))

    block(module, None, form)
    return found, arrays
