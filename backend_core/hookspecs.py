"""The hooks a plugin may implement.

A plugin is a module (or object) with functions marked ``@hookimpl``, found through the entry-point group
``mlx_accel.plugins``. Every hook but `register_kernels` takes one frozen dataclass of facts and, if it asks for it,
the :class:`~backend_core.policy.Policy` in force, and returns None ("nothing for this one"), one
:class:`~backend_core.offers.Offer`, or a list of offers. Hooks are called once
per place in a model at load time, never per token. They must not change global state, must not evaluate
mlx arrays and must not import heavy modules for sites they decline.

The core calls each implementation by itself: an exception, a wrong return type or a typo in a hook name is
recorded under the plugin's name and never reaches the user's program (unless ``strict=1``). Hook wrappers are
refused, since one plugin must not rewrite another's answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from .kernels_registry import Registry
    from .offers import Offer
    from .policy import Policy
    from .sites import AttentionSite, CheckpointSite, DraftSite, LinearSite, MoeSite, OpSite

PROJECT = "mlx_accel"
ENTRY_POINT_GROUP = "mlx_accel.plugins"
#: Version of this interface; a plugin states the one it was written for in mlx_accel.toml (`api = 1`).
API_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_kernels(registry: Registry) -> None:
    """Announce the kernels this plugin ships.

    Called once, before any other hook. ``registry.cpu(name=, library=, symbol=, exactness=)`` for a C
    function in a shared library, ``registry.source(name=, device=, path=, exactness=)`` for Metal or CUDA
    text. Registering runs nothing and compiles nothing; it makes the kernel appear in ``mlx-accel plugins``
    and puts its file's content into the key under which races are remembered, so that a new build is raced
    again.
    """


@hookspec
def select_linear(site: LinearSite, policy: Policy) -> Offer | list[Offer] | None:
    """Offer an implementation for one linear layer.

    ``offer.build(module)`` gets the live layer and returns what is called in its place:

    ========== ==================================================================================
    site.kind  the callable takes and returns
    ========== ==================================================================================
    linear     ``f(x)``: (…, k) -> (…, n), the layer's bias included
    embedding  ``f(x)``: (…, k) -> (…, n), in place of ``module.as_linear``
    switch     ``f(x, indices, sorted_indices)``: as mlx-lm's ``SwitchLinear``
    multi      ``f(x, transpose)``: as mlx-lm's ``MultiLinear``
    ========== ==================================================================================

    x has dtype ``site.x_dtype`` when the offer is verified and raced, the result must have
    ``site.out_dtype``. The layer's parameters stay in the module as they are: never convert or replace
    them, keep repacked copies in the callable (and state their size in ``Offer.copies``).
    """


@hookspec
def select_attention(site: AttentionSite, policy: Policy) -> Offer | list[Offer] | None:
    """Offer an implementation for one attention call shape.

    ``offer.build(None)`` returns ``f(queries, keys, values, cache, scale, mask, sinks)`` with the meaning of
    ``mlx_lm.models.base.scaled_dot_product_attention``: queries (B, n_heads, L, head_dim), keys and values
    (B, n_kv_heads, S, …), often slices of larger buffers, result (B, n_heads, L, value_dim) in the queries' dtype.
    mask is None, ``"causal"``, a bool array (True: visible) or an additive one. What it does not serve it answers
    with NotImplemented, and stock runs. ``Offer.rows`` is its range of L.
    """


@hookspec
def fuse_moe(site: MoeSite, policy: Policy) -> Offer | list[Offer] | None:
    """Offer an implementation for a whole block of routed experts.

    ``offer.build(module)`` returns ``f(x, indices)``: x (…, d_model), indices (…, top_k) of experts, result
    (…, top_k, d_model), unweighted, as mlx-lm's ``SwitchGLU``.
    """


@hookspec
def verify_draft(site: DraftSite, policy: Policy) -> Offer | list[Offer] | None:
    """Offer an implementation of the acceptance step of speculative decoding.

    ``offer.build(None)`` returns ``f(draft_tokens, target_logits) -> (n_accepted, tokens)``: draft_tokens
    (B, D) int32, target_logits (B, D + 1, vocab_size); n_accepted (B,) int32, tokens (B, D + 1) int32: the
    accepted prefix followed by the correction (or bonus) token, zeros after it.
    """


@hookspec
def select_op(site: OpSite, policy: Policy) -> Offer | list[Offer] | None:
    """Offer an implementation of a normalising, position, elementwise or reduction op.

    ``offer.build(module)`` gets the module (``nn.RMSNorm``, ``nn.RoPE``) or None for plain functions, and
    returns a callable with the signature of what it replaces.
    """


@hookspec
def adapt_checkpoint(site: CheckpointSite, policy: Policy) -> Offer | list[Offer] | None:
    """Offer to load a checkpoint that stock mlx-lm cannot load.

    ``offer.build(arguments)`` gets the keyword arguments of ``mlx_lm.utils.load_model`` as a dict and
    returns the arguments to load with, for instance with another ``get_model_classes``: a function ``f(config=...) ->
    (model class, arguments class)``, which is always there, for mlx-vlm too. The first offer of the preferred plugin is
    used. Sentences that the loaded model carries in ``model.__dict__["_accel_notes"]`` come into the report.
    """
