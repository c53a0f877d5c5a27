"""Toy plugins: real offers made of plain mlx operations, and broken ones."""

from __future__ import annotations

import dataclasses
import time
import types
from typing import Any

from backend_core import Offer, PluginHost, Policy, hookimpl


def module_with(**hooks: Any) -> types.ModuleType:
    """A plugin module whose attributes are hook implementations."""
    module = types.ModuleType("toy")
    for name, function in hooks.items():
        function.__name__ = name
        setattr(module, name, hookimpl(function))
    return module


def host(policy: Policy | None = None, **plugins: Any) -> PluginHost:
    """A host with exactly these plugins, none of the installed ones."""
    policy = policy or Policy()
    # Named plugins are looked for when a host is made; these are registered after it.
    unnamed = dataclasses.replace(policy, plugins="")
    result = PluginHost(unnamed, devices=("cpu",), isa=("portable",), entry_points=[])
    result.policy = policy
    for name, plugin in plugins.items():
        result.register(plugin, name)
    return result


def weights(module: Any) -> Any:
    """The layer's matrix in float32."""
    import mlx.core as mx

    if "scales" not in module:
        return module["weight"].astype(mx.float32)
    return mx.dequantize(
        module["weight"], module["scales"].astype(mx.float32), module["biases"].astype(mx.float32),
        group_size=module.group_size, bits=module.bits, mode=module.mode,
    )  # fmt: skip


def dequantized(site: Any, module: Any) -> Any:
    """An exact implementation of every kind of linear site."""
    import mlx.core as mx

    w = weights(module)
    out = getattr(mx, site.out_dtype)
    bias = module.get("bias")

    def matmul(x: Any, matrix: Any) -> Any:
        # Row by row: a matrix product may sum in another order when there are more rows.
        x = x.astype(mx.float32)
        return (x[..., None, :] @ matrix.swapaxes(-1, -2))[..., 0, :]

    if site.kind == "switch":

        def switch(x: Any, indices: Any, sorted_indices: bool = False) -> Any:
            y = x.astype(mx.float32) @ w[indices].swapaxes(-1, -2)
            if bias is not None:
                y = y + mx.expand_dims(bias[indices], -2)
            return y.astype(out)

        return switch
    if site.kind == "multi":
        return lambda x, transpose=True: (x.astype(mx.float32) @ (w.swapaxes(-1, -2) if transpose else w)).astype(out)

    def linear(x: Any) -> Any:
        y = matmul(x, w)
        if bias is not None:
            y = y + bias.astype(mx.float32)
        return y.astype(out)

    return linear


def exact_plugin(name: str = "exact", **offer: Any) -> types.ModuleType:
    """Serves every linear site with :func:`dequantized`."""

    def select_linear(site: Any) -> Offer:
        return Offer(name, lambda module: dequantized(site, module), row_invariant=True, **offer)

    return module_with(select_linear=select_linear)


def wrong_plugin(error: float = 1e-3) -> types.ModuleType:
    """Results off by a relative `error`."""

    def select_linear(site: Any) -> Offer:
        def build(module: Any) -> Any:
            right = dequantized(site, module)
            return lambda *args: right(*args) * (1 + error)

        return Offer("wrong", build, row_invariant=True)

    return module_with(select_linear=select_linear)


def raising_plugin(where: str = "call") -> types.ModuleType:
    """Raises in the hook, in build or in the call."""

    def select_linear(site: Any) -> Offer:
        if where == "hook":
            raise ZeroDivisionError("toy hook fault")

        def build(module: Any) -> Any:
            if where == "build":
                raise ZeroDivisionError("toy build fault")

            def call(*args: Any) -> Any:
                raise ZeroDivisionError("toy call fault")

            return call

        return Offer("raising", build, row_invariant=True)

    return module_with(select_linear=select_linear)


def slow_plugin(seconds: float = 0.02) -> types.ModuleType:
    """Right, and much slower than stock."""

    def select_linear(site: Any) -> Offer:
        def build(module: Any) -> Any:
            right = dequantized(site, module)

            def call(*args: Any) -> Any:
                time.sleep(seconds)
                return right(*args)

            return call

        return Offer("slow", build, row_invariant=True)

    return module_with(select_linear=select_linear)
