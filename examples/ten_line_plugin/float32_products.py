"""mlx-accel plugin: quantized layers in half precision on the CPU multiply in float32 and round once."""

import mlx.core as mx

from backend_core import Offer, hookimpl


@hookimpl
def select_linear(site):
    if (site.device, site.kind, site.mode) != ("cpu", "linear", "affine") or site.out_dtype == "float32":
        return None

    def build(layer):
        codes, bias, dtype = layer.weight, layer.get("bias", 0), getattr(mx, site.out_dtype)
        scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
        matrix = (codes, scales, biases, True, site.group_size, site.bits)
        return lambda x: (mx.quantized_matmul(x.astype(mx.float32), *matrix) + bias).astype(dtype)

    return Offer("wide", build, row_invariant=True, copies=8 * site.n * site.k // site.group_size)
