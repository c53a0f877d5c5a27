"""Sites: the places in a model that can be accelerated, as frozen facts.

A site never holds a module, an array or a function. Everything a plugin needs for its answer is a number, a
string or a tuple, so that a site can be printed, hashed, sent to another process and compared with a
profile. dtypes are mlx names (``"float16"``, ``"bfloat16"``, ``"float32"``, ``"uint32"``, ...).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar

#: Devices a site can live on.
DEVICES = ("cpu", "metal", "cuda")

#: Rows (M) by phase, both ends included; None is unbounded.
DECODE_ROWS = (1, 1)
VERIFY_ROWS = (2, 16)
PREFILL_ROWS = (17, None)


@dataclass(frozen=True)
class Site:
    """What all kinds of sites have in common.

    path
        Dotted path of the module in the model (``model.layers.0.mlp.up_proj``), or a name for a site that is
        not a module (an attention call shape).
    device
        ``"cpu"``, ``"metal"`` or ``"cuda"``: where mlx evaluates this site.
    host
        ``"mlx_lm"``, ``"mlx_vlm"`` or ``""`` when the model comes from elsewhere.
    model_type
        mlx-lm's ``model_type`` (``"llama"``), or ``""``.
    """

    path: str
    device: str = "cpu"
    host: str = ""
    model_type: str = ""

    hook: ClassVar[str] = ""
    #: Fields that say where the site is, not what it is: they do not enter the signature.
    _where: ClassVar[tuple[str, ...]] = ("path", "aliases", "host", "model_type")

    def facts(self) -> dict[str, Any]:
        """All fields as plain JSON-able values."""
        # Not dataclasses.asdict, which copies deeply; fields are numbers, strings and tuples of strings.
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values}

    @functools.cached_property
    def signature(self) -> str:
        """Sites with equal signatures run the same code on the same amount of work."""
        facts = {k: v for k, v in self.facts().items() if k not in self._where}
        text = json.dumps([self.hook, facts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class LinearSite(Site):
    """A linear layer, y = x @ W.T (+ bias).

    kind
        ``"linear"``: ``nn.Linear`` / ``nn.QuantizedLinear``, called as ``layer(x)``.
        ``"embedding"``: a (quantized) embedding used as output projection, called as ``layer.as_linear(x)``.
        ``"switch"``: one matrix per expert, called as ``layer(x, indices, sorted_indices=False)``.
        ``"multi"``: one matrix per head, called as ``layer(x, transpose=True)``.
    n, k
        Output and input features; W is (n, k), or (batch, n, k) for ``switch`` and ``multi``.
    mode, bits, group_size
        ``"dense"`` (bits and group_size 0), ``"affine"``, ``"mxfp4"``, ``"nvfp4"``, ``"mxfp8"``.
        affine: value = scale * q + bias with one scale and bias per ``group_size`` weights along k; the codes
        form a little-endian bit stream along k, ``bits`` bits each, stored in uint32 words.
    weight_dtype, scales_dtype
        dtype of ``layer.weight`` and of ``layer.scales`` (``""`` if there are none).
    has_bias
        True if the layer adds a bias vector of n values after the product.
    x_dtype, out_dtype
        dtype of the activations that reach the layer under the activations policy, and of stock's result.
    aliases
        Other paths under which the model holds the same module.
    in_lora
        True if the layer is wrapped by a LoRA/DoRA layer.
    """

    kind: str = "linear"
    n: int = 0
    k: int = 0
    batch: int = 1
    mode: str = "dense"
    bits: int = 0
    group_size: int = 0
    weight_dtype: str = "float32"
    scales_dtype: str = ""
    has_bias: bool = False
    x_dtype: str = "float32"
    out_dtype: str = "float32"
    aliases: tuple[str, ...] = ()
    in_lora: bool = False

    hook: ClassVar[str] = "select_linear"
    _where: ClassVar[tuple[str, ...]] = (*Site._where, "in_lora")

    def describe(self) -> str:
        """Shape and format for people: ``"1536x576 4-bit g32 affine"``."""
        packed = f"{self.bits}-bit g{self.group_size} {self.mode}"
        form = self.weight_dtype if self.mode == "dense" else packed
        batch = f"{self.batch}x" if self.batch > 1 else ""
        kind = "" if self.kind == "linear" else f" {self.kind}"
        return f"{batch}{self.n}x{self.k} {form}{kind}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, scales and biases that one call must read at least (all experts / heads)."""
        if self.mode == "dense":
            return self.batch * self.n * self.k * _ITEMSIZE.get(self.weight_dtype, 4)
        groups = self.batch * self.n * (self.k // max(self.group_size, 1))
        per_group = _ITEMSIZE.get(self.scales_dtype, 2) * (2 if self.mode == "affine" else 1)
        return self.batch * self.n * self.k * self.bits // 8 + groups * per_group


@dataclass(frozen=True)
class AttentionSite(Site):
    """A scaled dot-product attention call shape. Rows are query positions (L).

    n_heads, n_kv_heads, head_dim, value_dim
        Queries are (B, n_heads, L, head_dim), keys (B, n_kv_heads, S, head_dim), values (…, value_dim).
    q_len
        L where it is fixed by the caller, else 0: the offer's rows are its range of L.
    q_dtype, kv_dtype
        dtypes of queries and of the cache.
    mask
        ``"none"``, ``"causal"``, ``"bool"``, ``"additive"``, or ``"any"``: the callable gets whatever comes and may
        return NotImplemented, in which case stock runs.
    window
        Sliding-window length in tokens, 0 for full attention.
    has_sinks
        True if per-head sink logits are passed.
    kv_bits, kv_group_size
        0, or the quantization of the cache.
    cache
        Class name of the KV cache (``"KVCache"``), or ``""``.
    scale
        The factor on q·k.
    """

    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    q_len: int = 0
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    mask: str = "none"
    window: int = 0
    has_sinks: bool = False
    kv_bits: int = 0
    kv_group_size: int = 0
    cache: str = ""
    scale: float = 1.0

    hook: ClassVar[str] = "select_attention"

    def describe(self) -> str:
        """Shape for people: ``"attention 9/3 heads of 64 float32"``."""
        sinks = " sinks" if self.has_sinks else ""
        kept = f"{self.kv_bits}-bit g{self.kv_group_size} {self.kv_dtype}" if self.kv_bits else self.kv_dtype
        return f"attention {self.n_heads}/{self.n_kv_heads} heads of {self.head_dim} {kept}{sinks}"


@dataclass(frozen=True)
class MoeSite(Site):
    """A block of routed experts (``SwitchGLU``, ``SwitchMLP``), called as ``block(x, indices)``.

    d_model, d_hidden
        Input/output and hidden features of one expert.
    n_experts, top_k
        Experts in the block; experts per token (0 if the router alone knows).
    gated
        True for gate/up/down, False for fc1/fc2.
    activation
        Class name of the activation module.
    mode, bits, group_size, weight_dtype, scales_dtype
        As in :class:`LinearSite`, of the first projection; ``uniform`` is True if all projections agree.
    has_bias
        True if the projections carry biases.
    x_dtype
        dtype of the activations that reach the block.
    """

    d_model: int = 0
    d_hidden: int = 0
    n_experts: int = 0
    top_k: int = 0
    gated: bool = True
    activation: str = ""
    mode: str = "dense"
    bits: int = 0
    group_size: int = 0
    weight_dtype: str = "float32"
    scales_dtype: str = ""
    has_bias: bool = False
    uniform: bool = True
    x_dtype: str = "float32"

    hook: ClassVar[str] = "fuse_moe"


@dataclass(frozen=True)
class DraftSite(Site):
    """The acceptance step of speculative decoding.

    shape
        ``"linear"`` (a chain of drafts) or ``"tree"``.
    sampler
        ``"greedy"`` or ``"sample"``.
    max_draft
        Largest number of draft tokens verified at once.
    vocab_size
        Width of the logits.
    logits_dtype
        dtype of the target's logits.
    batch
        Sequences verified together.
    """

    shape: str = "linear"
    sampler: str = "greedy"
    max_draft: int = 0
    vocab_size: int = 0
    logits_dtype: str = "float32"
    batch: int = 1

    hook: ClassVar[str] = "verify_draft"


@dataclass(frozen=True)
class OpSite(Site):
    """An elementwise, normalising, position or reduction op between the linear layers.

    op
        ``"rms_norm"``, ``"layer_norm"``, ``"rope"``, ``"activation"``, ``"softcap"``, ``"residual"``,
        ``"logits"``, ``"kv_update"`` (keys and values enter a cache of dtype `out_dtype`), ``"lookup"`` (rows of an
        embedding; asked for where the layers of a model are joined).
    variant
        What exactly, e.g. ``"swiglu"`` or ``"gelu_approx"`` for activations, ``"argmax"`` for logits, ``"one_plus"``
        for norms that multiply by 1 + weight.
    dims
        Length of the axis the op works along; of a row for lookup.
    x_dtype, weight_dtype, out_dtype
        dtypes of input, of the op's parameters (``""`` if it has none) and of stock's result.
    eps
        For norms.
    rope_base, rope_scale, rope_traditional, rope_dims
        For rope: positions times ``rope_scale * rope_base ** (-2 i / rope_dims)`` are the angles.
    rope_freqs
        For rope with frequencies of its own: identifies them, and what the result is multiplied with
        (:func:`backend_core.rope.rotation_of`); base and scale say nothing then. ``""`` otherwise.
    """

    op: str = ""
    variant: str = ""
    dims: int = 0
    x_dtype: str = "float32"
    weight_dtype: str = ""
    out_dtype: str = "float32"
    eps: float = 0.0
    rope_base: float = 0.0
    rope_scale: float = 1.0
    rope_traditional: bool = False
    rope_dims: int = 0
    rope_freqs: str = ""

    hook: ClassVar[str] = "select_op"

    def describe(self) -> str:
        """Op and size for people: ``"rms_norm 576 float32"``."""
        return f"{self.op}{f' {self.variant}' if self.variant else ''} {self.dims} {self.x_dtype}"


@dataclass(frozen=True)
class CheckpointSite(Site):
    """A checkpoint directory about to be loaded; `path` is the directory.

    model_type
        From config.json.
    quant_method
        ``quantization_config.quant_method`` (``""`` if absent).
    quantization
        The quantization metadata of config.json as a JSON text (``""`` if absent).
    files
        Names of the files in the directory, sorted.
    """

    quant_method: str = ""
    quantization: str = ""
    files: tuple[str, ...] = ()

    hook: ClassVar[str] = "adapt_checkpoint"


@dataclass(frozen=True)
class JoinSite(Site):
    """A known block whose accelerated parts can run as one piece. The core itself makes the offer.

    kind
        ``"layer"``, ``"attention"``, ``"mlp"``, or ``"stack"``, whose parts are layers.
    width
        Features of a token.
    kv_heads, head_dim
        Heads of keys and values, and their length; 0 without attention.
    cached
        dtype of the cache where it is known.
    parts
        Signature of every part, in order.
    x_dtype, out_dtype
        dtypes of the block's input and result.
    """

    kind: str = ""
    width: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    cached: str = ""
    parts: tuple[str, ...] = ()
    x_dtype: str = "float32"
    out_dtype: str = "float32"

    hook: ClassVar[str] = "join"

    def describe(self) -> str:
        """``"layer of 12 parts, 576 float32"``."""
        return f"{self.kind} of {len(self.parts)} parts, {self.width} {self.x_dtype}"


SITE_TYPES: dict[str, type[Site]] = {
    cls.hook: cls for cls in (LinearSite, AttentionSite, MoeSite, DraftSite, OpSite, CheckpointSite)
}

_ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8, "float64": 8,
}  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes of one element of an mlx dtype name."""
    return _ITEMSIZE[dtype]
