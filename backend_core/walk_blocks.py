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

from .walk import host_of, sorted_modules, stock_class


@dataclass(frozen=True)
class AttentionForm:
    """q, k and v of x; (norms;) rope; cache; attention; output projection.

    norms
        q_norm and k_norm of each head.
    whole_norms
        q_norm and k_norm of all heads together.
    fused
        One projection, qkv_proj, makes q, k and v.
    """

    heads: str = "n_heads"
    kv_heads: str = "n_kv_heads"
    norms: bool = False
    whole_norms: bool = False
    fused: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the parts."""
        projections = ("qkv_proj",) if self.fused else ("q_proj", "k_proj", "v_proj")
        return (*projections, "o_proj", *(("q_norm", "k_norm") if self.norms or self.whole_norms else ()))


@dataclass(frozen=True)
class MLPForm:
    """down(activation(gate(x), up(x))); without `up`, `gate` makes both, one after the other.

    activation
        ``"swiglu"``, which models hold by name, or ``"geglu_approx"`` or ``"geglu"``, written out with ``mlx.nn``.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    activation: str = "swiglu"

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the parts."""
        return tuple(name for name in (self.gate, self.up, self.down) if name)


@dataclass(frozen=True)
class LayerForm:
    """h = x + attention(first(x)); h + mlp(second(h)), where each norm may be missing ("").

    after_attention, after_mlp
        Norms of what is added.
    clips
        In float16 the sums stay within the dtype's range.
    """

    first: str = "input_layernorm"
    attention: str = "self_attn"
    second: str = "post_attention_layernorm"
    mlp: str = "mlp"
    after_attention: str = ""
    after_mlp: str = ""
    clips: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the parts, but for attention and mlp."""
        return tuple(n for n in (self.first, self.after_attention, self.second, self.after_mlp) if n)


@dataclass(frozen=True)
class StackForm:
    """norm of all layers in turn, of the embeddings of tokens; masks are None for one token and plain caches.

    attributes
        What the module must have for that: (name, value).
    """

    embedding: str = "embed_tokens"
    norm: str = "norm"
    attributes: tuple[tuple[str, Any], ...] = ()


Form = AttentionForm | MLPForm | LayerForm

#: Hash of the code -> what it computes (mlx-lm 0.32).
FORMS: dict[str, Form] = {
    "a4c78480f2ee5219": AttentionForm(),
    "364d63257a430607": AttentionForm(norms=True),
    "6cc35c10e096e550": AttentionForm("num_attention_heads", "num_key_value_heads", norms=True),
    "595a719e0c4e959f": AttentionForm(norms=True),
    "d094947ca8de4e12": AttentionForm(whole_norms=True),
    "f8b140a98a8b2378": AttentionForm(fused=True),
    "1ccf0d982b225544": MLPForm(),
    "19ab2238a7174ac7": MLPForm(),
    "fc5f8272df7efafd": MLPForm("w1", "w3", "w2"),
    "37e4787407ab1129": MLPForm("gate_up_proj", ""),
    "2d5d436098447809": MLPForm(activation="geglu_approx"),
    "edf95a747cd1e4d4": MLPForm(activation="geglu"),
    "821b2d0196ca693e": LayerForm(),
    "8f1258accf794957": LayerForm(),
    "bfaa56d02325f686": LayerForm(
        second="pre_feedforward_layernorm",
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    "2a13d66e9fefb0a5": LayerForm(
        second="pre_feedforward_layernorm",
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
        clips=True,
    ),
    "6167814e8f7b635f": LayerForm(
        "", second="", after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
    ),
}


#: The same for the code that calls all layers.
STACKS: dict[str, StackForm] = {
    "0dd09d483427ccc9": StackForm(attributes=(("swa_idx", None),)),
    "602221086619676d": StackForm(),
    "6fe8bd3ac8dba7a5": StackForm(),
    "a1be00942fa953a2": StackForm(),
    "41cda3720f0583cf": StackForm(attributes=(("pipeline_size", 1), ("start_idx", 0), ("end_idx", None))),
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


#: Hash of the code of position embeddings that give x back.
_IDENTITY = "c74082f1ec8e49c4"


@functools.cache
def leaves_positions_out(cls: type) -> bool:
    """True for what models call in place of a rotary embedding in layers without positions."""
    function = vars(cls).get("__call__")
    return inspect.isfunction(function) and not function.__closure__ and code_hash(function) == _IDENTITY


@functools.cache
def form_of(cls: type) -> Form | None:
    """What instances of a stock class compute, None if that is not known."""
    function = vars(cls).get("__call__")
    if not inspect.isfunction(function) or function.__closure__:
        return None
    return FORMS.get(code_hash(function))


@functools.cache
def stack_form_of(cls: type) -> StackForm | None:
    """What instances of a class that holds all layers compute, None if that is not known."""
    function = vars(cls).get("__call__")
    # Names first, as above.
    if not inspect.isfunction(function) or function.__closure__ or "embed_tokens" not in function.__code__.co_names:
        return None
    return STACKS.get(code_hash(function))


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
    for path, module in sorted_modules(model):
        if id(module) not in seen and (form := form_of(stock_class(module))) is not None:
            seen.add(id(module))
            if isinstance(form, LayerForm) == layers:
                found.append((path, module, form))
    return found
