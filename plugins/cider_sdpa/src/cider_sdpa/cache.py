"""Keys and values enter a KV cache: one operation for both, with their conversion to the cache's dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

SYMBOL = "cider_cache_write"


def build(module: Any = None) -> Callable[..., tuple[mx.array, mx.array]]:
    """``f(cached_keys, cached_values, keys, values, offset) -> (cached_keys, cached_values)``.

    cached_keys (B, n_kv_heads, C, head_dim) and cached_values (B, n_kv_heads, C, value_dim) are a cache with room for
    C positions; keys and values (B, n_kv_heads, N, …) replace its positions offset .. offset + N - 1 and are rounded
    to its dtype. All are float32, float16 or bfloat16. The result has the bits of
    ``cached_keys[..., offset : offset + N, :] = keys``; the inputs stay what they are, and their memory is used for the
    result where nobody else holds it.

    What does not fit shows when the result is evaluated, as an error of the kernel.
    """
    write = _write()

    def update(cached_keys: mx.array, cached_values: mx.array, keys: mx.array, values: mx.array, offset: int) -> Any:
        return write(cached_keys, cached_values, keys, values, params=(offset,))

    # For who runs several kernels as one primitive.
    update.kernel = write  # type: ignore[attr-defined]
    return update


@functools.cache
def _write() -> Any:
    from backend_core.cpu_kernel import cpu_kernel, like

    from .plugin import library

    kernel = cpu_kernel(library(), SYMBOL, name="cider_sdpa/cache", ensure_row_contiguous=False)
    return kernel.bind(
        output_shapes=[like(0), like(1)], output_dtypes=[like(0), like(1)], params=[0], donate={0: 0, 1: 1}
    )
