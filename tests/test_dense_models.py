"""Dense models through the plugin host_linear: every linear layer runs it, and the text is stock's in float32."""

from __future__ import annotations

import mlx.core as mx
import pytest
import tiny_models

from backend_core import Policy, accelerate, restore

pytest.importorskip("host_linear")


def greedy(model, prompt, steps):
    from mlx_lm.models.cache import make_prompt_cache

    cache, step, tokens = make_prompt_cache(model), prompt, []
    for _ in range(steps):
        tokens.append(int(mx.argmax(model(mx.array([step]), cache=cache)[0, -1]).item()))
        step = tokens[-1:]
    return tokens


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_dense_model_says_what_stock_says_in_float32(dtype, installed_plugins):
    model = tiny_models.build("llama", dtype=dtype)
    wide = tiny_models.build("llama", dtype=dtype)
    wide.apply(lambda p: p.astype(mx.float32))
    prompt = [1, 5, 3, 7, 2, 9, 4]
    want = greedy(wide, prompt, 12)
    report = accelerate(model, Policy(deterministic=True, plugins="host_linear", activations="float32"))
    runs = [d for d in report.decisions if d.site.hook == "select_linear"]
    assert len(runs) == 15 and all(d.chosen == "host_linear/dense" for d in runs)
    assert greedy(model, prompt, 12) == want
    restore(model)
