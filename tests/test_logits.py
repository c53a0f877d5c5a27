"""logsumexp in mlx-lm's generation loops: only for the accelerated model, and given back."""

from __future__ import annotations

import importlib
import inspect
import sys

import mlx.core as mx
import mlx_lm  # noqa: F401
import numpy as np
import pytest
import tiny_models
import toys
from test_models import close

from backend_core import Offer, Policy, accelerate, reference_ops, restore
from backend_core.integrations import logits
from backend_core.report import STOCK

generation = sys.modules["mlx_lm.generate"]
POLICY = Policy(deterministic=True, activations="model")
PROMPT = mx.array([3, 7, 1, 4])


def plugin(calls, factor=1.0):
    def select_op(site):
        if (site.op, site.variant) != ("logits", "logsumexp"):
            return None

        def build(module):
            def logsumexp(x):
                calls.append(x.shape)
                return mx.logsumexp(x, axis=-1, keepdims=True) * factor

            return logsumexp

        return Offer("mine", build, row_invariant=True)

    return toys.host(POLICY, mine=toys.module_with(select_op=select_op))


def tokens(model, n=6, **options):
    return [(int(t), np.array(p)) for t, p in generation.generate_step(PROMPT, model, max_tokens=n, **options)]


def same(a, b):
    assert [t for t, _ in a] == [t for t, _ in b]
    close([mx.array(p) for _, p in a], [mx.array(p) for _, p in b])


@pytest.fixture
def two():
    models = tiny_models.build("llama"), tiny_models.build("llama", seed=1)
    yield models
    for m in models:
        restore(m)


def functions():
    return [
        generation.generate_step,
        generation.speculative_generate_step,
        vars(generation.GenerationBatch)["_step"],
    ]


def test_a_reference_agrees_with_stock():
    x = mx.random.normal((3, 500), key=mx.random.key(1)) * 5
    y64 = reference_ops.logsumexp(np.array(x).astype(np.float64))
    bound = reference_ops.logsumexp_bound(y64, 500, "float32")
    assert (np.abs(np.array(mx.logsumexp(x, axis=-1, keepdims=True)) - y64) <= bound).all()


def test_only_the_accelerated_model(two):
    first, second = two
    want = tokens(first), tokens(second)
    before = [(f, f.__code__, inspect.signature(f)) for f in functions()]
    names = set(vars(generation))
    calls = []
    report = accelerate(first, POLICY, host=plugin(calls))
    assert report.decision("logsumexp()", "select_op").chosen == "mine/mine"
    calls.clear()
    same(tokens(first), want[0])
    assert calls and set(calls) == {(1, tiny_models.VOCAB)}
    calls.clear()
    same(tokens(second), want[1])
    assert not calls
    assert [inspect.signature(f) for f in functions()] == [s for _, _, s in before]
    restore(first)
    assert [(f, f.__code__, inspect.signature(f)) for f in functions()] == before
    assert set(vars(generation)) == names and not hasattr(generation.generate_step, "__signature__")
    same(tokens(first), want[0])
    assert not calls


def test_two_accelerated_models(two):
    calls = [], []
    for m, c in zip(two, calls, strict=True):
        accelerate(m, POLICY, host=plugin(c))
    for c in calls:
        c.clear()
    tokens(two[0], 3)
    assert calls[0] and not calls[1]
    restore(two[0])
    calls[0].clear()
    tokens(two[0], 3)
    tokens(two[1], 3)
    assert not calls[0] and calls[1]


def test_a_running_loop_outlives_restore(two):
    calls = []
    accelerate(two[0], POLICY, host=plugin(calls))
    loop = generation.generate_step(PROMPT, model=two[0], max_tokens=6)
    first = [int(next(loop)[0]) for _ in range(2)]
    restore(two[0])
    rest = [int(t) for t, _ in loop]
    assert first + rest == [t for t, _ in tokens(two[0])]


def test_drafts_and_batches(two):
    model, draft = two

    def drafted():
        return [int(t) for t, _, _ in generation.speculative_generate_step(PROMPT, model, draft, max_tokens=6)]

    def batched():
        batch = generation.BatchGenerator(model, max_tokens=4)
        batch.insert([[3, 7, 1], [5, 2]])
        out = {}
        for _ in range(8):
            for r in batch.next()[1]:
                out.setdefault(r.uid, []).append(r.token)
        return out

    want = drafted(), batched()
    calls = []
    accelerate(model, POLICY, host=plugin(calls))
    calls.clear()
    assert drafted() == want[0] and calls
    calls.clear()
    assert batched() == want[1] and calls


def greedy_plugin(calls, answer=lambda x: mx.argmax(x, axis=-1)):
    def select_op(site):
        if (site.op, site.variant) != ("logits", "argmax"):
            return None

        def build(module):
            def argmax(x):
                calls.append(x.shape)
                return answer(x)

            return argmax

        return Offer("mine", build, row_invariant=True)

    return toys.host(POLICY, mine=toys.module_with(select_op=select_op))


def test_greedy_sampling_of_the_accelerated_model(two):
    from mlx_lm.sample_utils import greedy_sampler, make_sampler

    first, second = two
    want, calls = tokens(first), []
    report = accelerate(first, POLICY, host=greedy_plugin(calls))
    assert report.decision("argmax()", "select_op").chosen == "mine/mine"
    drafted = generation.speculative_generate_step
    for run in (
        lambda: tokens(first),
        lambda: tokens(first, sampler=make_sampler(0.0)),
        lambda: [(t, p) for t, p, _ in drafted(PROMPT, first, second, max_tokens=6)],
    ):
        calls.clear()
        same([(int(t), np.array(p)) for t, p in run()], want)
        assert calls
    calls.clear()
    tokens(second)
    tokens(first, sampler=lambda p: mx.argmax(p, axis=-1))
    tokens(first, sampler=make_sampler(0.8))
    assert not calls
    assert generation.greedy_sampler is greedy_sampler
    loop = generation.generate_step(PROMPT, first, max_tokens=4)
    next(loop)
    restore(first)
    calls.clear()
    list(loop)
    same(tokens(first), want)
    assert not calls


def test_a_wrong_argmax_is_not_installed(two):
    report = accelerate(two[0], POLICY, host=greedy_plugin([], lambda x: mx.argmin(x, axis=-1)))
    decision = report.decision("argmax()", "select_op")
    assert decision.chosen == STOCK and "wrong result" in decision.losers[0].reason


def test_the_greedy_samplers_of_both_hosts_are_known():
    sampling = sys.modules["mlx_lm.sample_utils"]
    assert logits._is_greedy(sampling.greedy_sampler) and logits._is_greedy(sampling.make_sampler(0.0))
    assert not logits._is_greedy(sampling.make_sampler(0.5)) and not logits._is_greedy(mx.argmax)
    assert not logits._is_greedy(lambda x: mx.argmax(x, axis=-1))
    vlm = pytest.importorskip("mlx_vlm.sample_utils")
    assert logits._is_greedy(vlm.make_sampler(0.0)) and not logits._is_greedy(vlm.make_sampler(0.7))


@pytest.mark.vlm
def test_the_loop_of_mlx_vlm():
    loops = pytest.importorskip("mlx_vlm.generate.ar")
    module = importlib.import_module("mlx_vlm.models.qwen2_vl")
    text = {
        "model_type": "qwen2_vl", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 320,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {"model_type": "qwen2_vl", "depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4,
              "patch_size": 14, "in_channels": 3}  # fmt: skip
    config = module.ModelConfig.from_dict({**text, "vision_config": dict(vision), "image_token_id": 300,
                                           "video_token_id": 301, "vision_start_token_id": 302})  # fmt: skip
    config.vision_config = module.VisionConfig.from_dict(vision)
    config.text_config = module.TextConfig.from_dict(text)
    mx.random.seed(0)
    model = module.Model(config)

    def run():
        return [
            (int(t), np.array(p))
            for t, p in loops.generate_step(PROMPT[None], model, None, None, max_tokens=5, temperature=0.0)
        ]

    want, code = run(), loops.generate_step.__code__
    calls = {}

    def select_op(site):
        if site.op != "logits":
            return None
        stock = {
            "argmax": lambda x: mx.argmax(x, axis=-1),
            "logsumexp": lambda x: mx.logsumexp(x, axis=-1, keepdims=True),
        }[site.variant]

        def counted(x):
            calls[site.variant] = calls.get(site.variant, 0) + 1
            return stock(x)

        return Offer("mine", lambda _: counted, row_invariant=True)

    report = accelerate(model, POLICY, host=toys.host(POLICY, mine=toys.module_with(select_op=select_op)))
    assert report.decision("argmax()", "select_op").chosen == "mine/mine"
    calls.clear()
    same(run(), want)
    assert calls.keys() == {"argmax", "logsumexp"}
    restore(model)
    assert loops.generate_step.__code__ is code
    calls.clear()
    same(run(), want)
    assert not calls


def test_a_wrong_one_is_not_installed(two):
    code = generation.generate_step.__code__
    report = accelerate(two[0], POLICY, host=plugin([], 1.001))
    decision = report.decision("logsumexp()", "select_op")
    assert decision.chosen == STOCK and "wrong result" in decision.losers[0].reason
    assert generation.generate_step.__code__ is code


def test_the_stand_in_passes_the_rest_on():
    stand_in = logits._StandIn()
    stand_in._functions[mx.float32] = lambda x: "ours"
    x = mx.random.normal((2, 5), key=mx.random.key(0))
    assert stand_in.array is mx.array and stand_in.float32 == mx.float32
    assert stand_in.logsumexp(x, axis=-1, keepdims=True) == "ours"
    assert stand_in.logsumexp(x[:1], keepdims=True) == "ours"
    for args, options in [((x,), {}), ((x, -1), {}), ((x,), {"keepdims": True}), ((x, 0), {"keepdims": True})]:
        assert np.array_equal(np.array(stand_in.logsumexp(*args, **options)), np.array(mx.logsumexp(*args, **options)))
    half = x.astype(mx.float16)
    assert stand_in.logsumexp(half, axis=-1, keepdims=True).dtype == mx.float16
    with pytest.raises(AttributeError):
        _ = stand_in.nothing


def test_parameters_of_the_loops_still_work(two):
    accelerate(two[0], POLICY, host=plugin([]))
    with pytest.raises(TypeError):
        list(generation.generate_step(PROMPT, two[0], nothing=1))
    seen = []
    same(
        tokens(two[0], sampler=lambda p: (seen.append(p.shape), mx.argmax(p, axis=-1))[1]),
        tokens(two[0]),
    )
    assert len(seen) >= 6
