"""Blocks whose code is known: attention, gated feed-forward, and the decoder layer that holds both.

Most decoder models are written with the same few blocks. A block is recognised by its code, not by its class: the
syntax tree of ``__call__``, without annotations and comments, is hashed and looked up. A model that computes anything
else has another hash.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from .walk import host_of, modules_of, natural, stock_class


@dataclass(frozen=True)
class AttentionForm:
    """q, k and v of x; (norms of the heads;) rope; cache; attention; output projection."""

    heads: str = "n_heads"
    kv_heads: str = "n_kv_heads"
    norms: bool = False


@dataclass(frozen=True)
class MLPForm:
    """down(swiglu(gate(x), up(x)))."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class LayerForm:
    """h = x + attention(norm(x)); h + mlp(norm(h))."""

    first: str = "input_layernorm"
    attention: str = "self_attn"
    second: str = "post_attention_layernorm"
    mlp: str = "mlp"


Form = AttentionForm | MLPForm | LayerForm

#: Hash of the code -> what it computes (mlx-lm 0.32).
FORMS: dict[str, Form] = {
    "a4c78480f2ee5219": AttentionForm(),
    "364d63257a430607": AttentionForm(norms=True),
    "6cc35c10e096e550": AttentionForm("num_attention_heads", "num_key_value_heads", norms=True),
    "1ccf0d982b225544": MLPForm(),
    "19ab2238a7174ac7": MLPForm(),
    "fc5f8272df7efafd": MLPForm("w1", "w3", "w2"),
    "821b2d0196ca693e": LayerForm(),
    "8f1258accf794957": LayerForm(),
}


#: Hash of the code of norms that compute ``mx.fast.rms_norm(x, 1.0 + self.weight, self.eps)``.
ONE_PLUS = "14e67068073f2f50"


@functools.cache
def multiplies_by_one_plus(cls: type) -> bool:
    """True for RMS norms that multiply by 1 + weight, as Gemma's do."""
    function = vars(cls).get("__call__")
    # Names first: reading and parsing the code of every class would take long.
    if not inspect.isfunction(function) or function.__closure__ or "rms_norm" not in function.__code__.co_names:
        return False
    return code_hash(function) == ONE_PLUS


@functools.cache
def form_of(cls: type) -> Form | None:
    """What instances of a stock class compute, None if that is not known."""
    function = vars(cls).get("__call__")
    if not inspect.isfunction(function) or function.__closure__:
        return None
    return FORMS.get(code_hash(function))


def code_hash(function: Any) -> str:
    """Hash of a function's syntax tree, the same under every version of Python; "" without its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ""
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return ""
    body = definition.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return hashlib.sha256(repr((_plain(definition.args), _plain(body))).encode()).hexdigest()[:16]


#: Fields that say nothing about what is computed, or are not there in every version of Python.
_SKIPPED = frozenset(("annotation", "returns", "type_comment", "ctx", "kind", "decorator_list", "type_params"))


def _plain(node: Any) -> Any:
    if isinstance(node, ast.AST):
        fields = ((k, v) for k, v in ast.iter_fields(node) if k not in _SKIPPED and v is not None and v != [])
        return (type(node).__name__, *((k, _plain(v)) for k, v in fields))
    return tuple(map(_plain, node)) if isinstance(node, list) else repr(node)


def find_blocks(model: Any, layers: bool, done: set[int]) -> list[tuple[str, Any, Form]]:
    """(path, module, form) of the known blocks of an mlx-lm or mlx-vlm model.

    layers: whole decoder layers, or the blocks they are made of. done: ids of modules to leave out.
    """
    if not host_of(model):
        return []
    found, seen = [], set(done)
    for path, module in sorted(modules_of(model), key=lambda item: natural(item[0])):
        if id(module) not in seen and (form := form_of(stock_class(module))) is not None:
            seen.add(id(module))
            if isinstance(form, LayerForm) == layers:
                found.append((path, module, form))
    return found
