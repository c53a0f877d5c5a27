"""Selection: every site ends with one decision, and every loser with a reason."""

from __future__ import annotations

import json
import os
import signal
import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_models
import toys

from backend_core import Offer, PluginError, Policy, accelerate, probes, restore, walk_calls
from backend_core import race as race_module
from backend_core.errors import VerificationError
from backend_core.race import Timing
from backend_core.report import STOCK
from backend_core.sites import LinearSite

DETERMINISTIC = Policy(deterministic=True, activations="model")


class Two(nn.Module):
    """Two layers of one signature."""

    def __init__(self) -> None:
        super().__init__()
        mx.random.seed(0)
        self.a = nn.QuantizedLinear(64, 96, bias=False, group_size=32, bits=4)
        self.b = nn.QuantizedLinear(64, 96, bias=False, group_size=32, bits=4)

    def __call__(self, x: mx.array) -> mx.array:
        return self.a(x) + self.b(x)


def losers(report, path: str = "a") -> dict[str, str]:
    return {x.offer: x.reason for x in report.decision(path).losers}


def select(policy: Policy = DETERMINISTIC, model: nn.Module | None = None, **plugins):
    return accelerate(model or Two(), policy, host=toys.host(policy, **plugins))


def fake_race(monkeypatch: pytest.MonkeyPatch, times: dict[str, dict[int, float]], spread: float = 0.01) -> list:
    """Race results by offer name: our seconds, with stock at 1.0 a row. Returns the list of races run."""
    ran = []

    def race(probe, modules, ours, rows, device="cpu", **_):
        name = ours.__closure__ and [c.cell_contents for c in ours.__closure__ if isinstance(c.cell_contents, dict)]
        slot = next(iter(name[0].values()))
        label = getattr(slot.small, "offer_name", "exact")
        ran.append((label, tuple(rows), len(modules)))
        return {m: Timing(times[label][m], float(m), spread) for m in rows}

    monkeypatch.setattr(race_module, "race", race)
    return ran


def offer(name: str, rows=(1, None), row_invariant=True, preference=0, exactness="rounding"):
    def select_linear(site):
        def build(module):
            right = toys.dequantized(site, module)

            def call(x):
                return right(x)

            call.offer_name = name
            return call

        return Offer(name, build, rows=rows, row_invariant=row_invariant, preference=preference, exactness=exactness)

    return toys.module_with(select_linear=select_linear)


FAST = {1: 0.5, 4: 2.0, 16: 8.0, 64: 32.0}


def test_the_faster_of_two_offers_wins_and_the_other_is_told_why(monkeypatch) -> None:
    fake_race(monkeypatch, {"fast": FAST, "faster": {k: v / 2 for k, v in FAST.items()}})
    report = select(Policy(), p=offer("fast"), q=offer("faster"))
    assert report.decision("a").chosen == report.decision("b").chosen == "q/faster"
    assert report.decision("a").ratio == pytest.approx(4.0)
    assert "q/faster is faster" in losers(report)["p/fast"]
    assert "4.00x slower" in losers(report)[STOCK]


def test_an_offer_that_is_not_measurably_faster_stays_out(monkeypatch) -> None:
    even = {1: 1.0, 4: 4.0, 16: 16.0, 64: 64.0}
    fake_race(monkeypatch, {"even": even})
    report = select(Policy(), p=offer("even"))
    assert report.decision("a").chosen == STOCK and not report.decision("a").accelerated
    assert "no measured win" in losers(report)["p/even"]
    # Faster by less than the noise is no win either.
    fake_race(monkeypatch, {"noisy": {k: v * 0.9 for k, v in even.items()}}, spread=0.2)
    assert select(Policy(), p=offer("noisy")).decision("a").chosen == STOCK


def test_rows_1_to_16_are_one_unit_that_never_loses_at_rows_1(monkeypatch) -> None:
    fake_race(monkeypatch, {"verify": {1: 1.2, 4: 0.4, 16: 1.0, 64: 1.0}})
    report = select(Policy(), p=offer("verify"))
    small, large = report.decision("a").buckets
    assert small.chosen == STOCK and small.rows == (1, 16)
    assert large.chosen == "p/verify" and large.rows == (17, None) and large.ratio == pytest.approx(64.0)
    # Even at rows 1 and much faster at more rows: a win.
    fake_race(monkeypatch, {"even": {1: 1.0, 4: 0.4, 16: 1.0, 64: 90.0}})
    report = select(Policy(), p=offer("even"))
    small, large = report.decision("a").buckets
    assert small.chosen == "p/even" and large.chosen == STOCK


def test_offers_for_some_rows_only_cannot_split_the_unit(monkeypatch) -> None:
    fake_race(monkeypatch, {"one": FAST, "big": FAST})
    report = select(Policy(), p=offer("one", rows=(1, 1)), q=offer("big", rows=(17, None)))
    small, large = report.decision("a").buckets
    assert (small.chosen, large.chosen) == (STOCK, "q/big")
    assert "rows 1..16: covers rows 1..1 only" in losers(report)["p/one"]


def test_an_offer_that_is_not_row_invariant_serves_prompts_only(monkeypatch) -> None:
    fake_race(monkeypatch, {"loose": FAST})
    report = select(Policy(), p=offer("loose", row_invariant=False))
    small, large = report.decision("a").buckets
    assert (small.chosen, large.chosen) == (STOCK, "p/loose")
    assert "not row-invariant" in losers(report)["p/loose"]


def test_a_false_claim_of_row_invariance_is_found() -> None:
    def select_linear(site):
        def build(module):
            right = toys.dequantized(site, module)
            return lambda x: right(x) * (1.0 if x.size == site.k else 1.0 + 2**-23)

        return Offer("liar", build, row_invariant=True)

    report = select(p=toys.module_with(select_linear=select_linear))
    assert report.decision("a").chosen == STOCK
    assert "claims to be row-invariant" in losers(report)["p/liar"]


def test_a_false_claim_of_stocks_bits_is_found() -> None:
    def select_linear(site):
        def build(module):
            def same(x):
                return mx.quantized_matmul(x, module.weight, module.scales, module.biases, transpose=True,
                                           group_size=module.group_size, bits=module.bits)  # fmt: skip

            return (lambda x: same(x) * (1 + 2**-22)) if names[0] == "liar" else same

        return Offer(names[0], build, row_invariant=True, exactness="bitwise")

    for names, chosen in ((["same"], "p/same"), (["liar"], STOCK)):  # noqa: B007  (read by the closure)
        report = select(p=toys.module_with(select_linear=select_linear))
        assert report.decision("a").chosen == chosen
    assert "claims stock's bits" in losers(report)["p/liar"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda y: y[..., :-1], "result has shape"),
        (lambda y: y.astype(mx.float16), "result has dtype"),
        (lambda y: y * float("nan"), "wrong result (rows 1, last row): inf times"),
        (lambda y: mx.zeros_like(y), "times the rounding bound"),
        (lambda y: mx.concatenate([y[..., :-1], y[..., -1:] + 1], axis=-1), "column 95"),
    ],
    ids=["shape", "dtype", "nan", "zeros", "last column"],
)
def test_wrong_results_are_found(make, reason) -> None:
    def select_linear(site):
        def build(module):
            right = toys.dequantized(site, module)
            return lambda x: make(right(x))

        return Offer("wrong", build, row_invariant=True)

    report = select(p=toys.module_with(select_linear=select_linear))
    assert report.decision("a").chosen == STOCK
    assert reason in losers(report)["p/wrong"]


def test_wrong_at_many_rows_only_is_found_in_the_last_row_and_columns() -> None:
    def select_linear(site):
        def build(module):
            right = toys.dequantized(site, module)

            def call(x):
                y = right(x)
                if x.size // site.k > 16:
                    y = mx.concatenate([y[..., :-1], y[..., -1:] * 1.01], axis=-1)
                return y

            return call

        return Offer("edge", build, row_invariant=True)

    assert "rows 20" in losers(select(p=toys.module_with(select_linear=select_linear)))["p/edge"]


@pytest.mark.parametrize("rows", [(20, None), (21, None), (64, None), (17, 17), (2, 16)])
def test_offers_for_any_range_of_rows_are_verified_within_it(rows) -> None:
    seen = []

    def select_linear(site):
        def build(module):
            right = toys.dequantized(site, module)

            def call(x):
                seen.append(x.size // site.k)
                return right(x)

            return call

        return Offer("ranged", build, rows=rows, row_invariant=True)

    report = select(p=toys.module_with(select_linear=select_linear))
    assert seen and all(rows[0] <= m and (rows[1] is None or m <= rows[1]) for m in seen)
    assert "wrong" not in losers(report)["p/ranged"] and "verification" not in str(report.notes)


def test_one_bad_layer_among_equals_stays_stock_alone() -> None:
    model = Two()

    def select_linear(site):
        def build(module):
            right = toys.dequantized(site, module)
            return (lambda x: right(x) + 1) if module is model.b else right

        return Offer("sometimes", build, row_invariant=True)

    report = select(model=model, p=toys.module_with(select_linear=select_linear))
    assert report.decision("a").chosen == "p/sometimes" and report.decision("b").chosen == STOCK
    assert type(model.b) is nn.QuantizedLinear and type(model.a) is not nn.QuantizedLinear


def test_layers_of_one_signature_may_get_different_offers() -> None:
    def select_linear(site):
        return Offer(f"for_{site.path}", lambda module: toys.dequantized(site, module), row_invariant=True)

    report = select(p=toys.module_with(select_linear=select_linear))
    assert [d.chosen for d in report.decisions] == ["p/for_a", "p/for_b"]


@pytest.mark.parametrize("where", ["hook", "build", "call"])
def test_exceptions_anywhere_are_reasons_and_under_strict_errors(where) -> None:
    report = select(p=toys.raising_plugin(where))
    assert report.decision("a").chosen == STOCK
    [reason] = [r for label, r in losers(report).items() if label.startswith("p")]
    assert f"ZeroDivisionError: toy {where} fault" in reason
    model = Two()
    policy = Policy(deterministic=True, strict=True)
    with pytest.raises(PluginError, match=f"toy {where} fault"):
        accelerate(model, policy, host=toys.host(policy, p=toys.raising_plugin(where)))
    assert type(model.a) is nn.QuantizedLinear


@pytest.mark.parametrize(
    "mutate",
    [
        lambda m: setattr(m, "scales", m.scales * 0),
        lambda m: m.scales.__imul__(2.0),
        lambda m: setattr(m, "extra", mx.zeros((3,))),
        lambda m: m.__dict__.update(bits=2),
        lambda m: m.__dict__.update(new="attribute"),
    ],
    ids=["other arrays", "in place", "new array", "changed attribute", "new attribute"],
)
def test_a_build_that_changes_the_layer_is_undone_and_out(mutate) -> None:
    def select_linear(site):
        def build(module):
            right = toys.dequantized(site, module)
            mutate(module)
            return right

        return Offer("meddler", build, row_invariant=True)

    model = Two()
    want = model(mx.ones((1, 64)))
    state = [(dict(m.__dict__), sorted(m)) for m in (model.a, model.b)]
    report = select(model=model, p=toys.module_with(select_linear=select_linear))
    assert report.decision("a").chosen == STOCK and "build changed the layer" in losers(report)["p/meddler"]
    assert [(dict(m.__dict__), sorted(m)) for m in (model.a, model.b)] == state
    assert mx.array_equal(model(mx.ones((1, 64))), want)


@pytest.mark.parametrize("error", [SystemExit(3), type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})()])
@pytest.mark.parametrize("where", ["build", "call"])
def test_what_a_plugin_raises_never_escapes(error, where) -> None:
    def select_linear(site):
        def build(module):
            if where == "build":
                raise error

            def call(x):
                raise error

            return call

        return Offer("p", build, row_invariant=True)

    report = select(p=toys.module_with(select_linear=select_linear))
    assert report.decision("a").chosen == STOCK and type(error).__name__ in losers(report)["p/p"]
    assert (report.notes and "failed verification" in report.notes[-1]) or where == "build"


def test_lossy_offers_need_permission_and_keep_their_tolerance() -> None:
    def plugin(error: float):
        def select_linear(site):
            def build(module):
                right = toys.dequantized(site, module)
                return lambda x: right(x) * (1 + error)

            return Offer("lossy", build, row_invariant=True, exactness="lossy", tolerance=0.01)

        return toys.module_with(select_linear=select_linear)

    assert "allow=lossy admits it" in losers(select(p=plugin(0.001)))["p/lossy"]
    allowed = Policy(deterministic=True, allow="lossy")
    assert select(allowed, p=plugin(0.001)).decision("a").chosen == "p/lossy"
    assert "relative error 0.05" in losers(select(allowed, p=plugin(0.05)))["p/lossy"]


def test_deterministic_follows_preference_and_times_nothing(monkeypatch) -> None:
    monkeypatch.setattr(race_module, "race", None)
    report = select(p=offer("low", preference=1), q=offer("high", preference=2))
    assert report.decision("a").chosen == "q/high"
    assert report.decision("a").buckets[0].how == "deterministic"
    assert "q/high is preferred" in losers(report)["p/low"]


def test_profile_hits_skip_the_race_but_not_the_verification(monkeypatch) -> None:
    ran = fake_race(monkeypatch, {"fast": FAST})
    assert select(Policy(), p=offer("fast")).decision("a").buckets[0].how == "raced"
    assert ran == [("fast", (1, 4, 16, 64), 2)]
    report = select(Policy(), p=offer("fast"))
    assert len(ran) == 1 and report.decision("a").buckets[0].how == "profile"
    assert report.decision("a").ratio == pytest.approx(2.0)
    report = select(Policy(race="force"), p=offer("fast"))
    assert len(ran) == 2
    # The same names, the same profile entry, but wrong numbers now.

    def select_linear(site):
        return Offer("fast", lambda m: lambda x: toys.dequantized(site, m)(x) * 2, row_invariant=True)

    wrong = toys.module_with(select_linear=select_linear)
    assert select(Policy(), p=wrong).decision("a").chosen == STOCK


def test_every_layer_of_a_big_group_is_verified_at_one_row_and_another_length(monkeypatch) -> None:
    """The first one in full, unless the profile says that an earlier process did so."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            mx.random.seed(0)
            self.layers = [nn.QuantizedLinear(64, 96, bias=False, group_size=32, bits=4) for _ in range(9)]

    fake_race(monkeypatch, {"fast": FAST})
    seen: dict[int, list[int]] = {}
    broken: set[int] = set()

    def select_linear(site):
        number = int(site.path.rpartition(".")[2])

        def build(module):
            right = toys.dequantized(site, module)

            def call(x):
                rows = x.size // site.k
                seen.setdefault(number, []).append(rows)
                return right(x) * (2 if number in broken and rows > 1 else 1)

            call.offer_name = "fast"
            return call

        return Offer("fast", build, row_invariant=True)

    plugin = toys.module_with(select_linear=select_linear)
    model = Many()
    assert all(d.accelerated for d in select(Policy(), model, p=plugin).decisions)
    assert len(seen.pop(0)) >= 3 and len(seen) == 8
    turns = [[1, 20 if i % 2 else 2 + (3 + 7 * i) % 15] for i in range(9)]
    assert all(rows == turns[i] for i, rows in seen.items())
    restore(model)
    seen.clear()
    report = select(Policy(), model, p=plugin)
    assert all(d.accelerated and d.buckets[0].how == "profile" for d in report.decisions)
    assert seen == dict(enumerate(turns))
    broken.update((3, 4))
    for policy in (Policy(), Policy(deterministic=True)):
        restore(model)
        stock = [d.site.path for d in select(policy, model, p=plugin).decisions if not d.accelerated]
        assert stock == ["layers.3", "layers.4"]


def test_what_lost_by_the_profile_is_not_run_again(monkeypatch) -> None:
    ran: list[str] = []

    def select_linear(site):
        def build(module):
            right = toys.dequantized(site, module)

            def call(x):
                ran.append(site.path)
                return right(x)

            call.offer_name = "slow"
            return call

        return Offer("slow", build, row_invariant=True)

    plugin = toys.module_with(select_linear=select_linear)
    fake_race(monkeypatch, {"slow": {m: 2.0 * m for m in FAST}})
    policy = Policy(plugins="+p")
    for expected in (True, False):
        ran.clear()
        report = accelerate(Two(), policy, host=toys.host(policy, p=plugin))
        assert report.decision("a").chosen == STOCK and "0.50x" in losers(report)["p/slow"]
        assert bool(ran) is expected


def test_what_won_by_the_profile_and_raises_now_is_tried_on_two_layers(monkeypatch) -> None:
    fake_race(monkeypatch, {"fast": FAST})
    assert select(Policy(), p=offer("fast")).decision("a").accelerated
    tried = []

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.QuantizedLinear(64, 96, bias=False, group_size=32, bits=4) for _ in range(4)]

    def select_linear(site):
        def call(x):
            tried.append(site.path)
            raise RuntimeError("does not compile")

        return Offer("fast", lambda module: call, row_invariant=True)

    report = select(Policy(), Many(), p=toys.module_with(select_linear=select_linear))
    assert set(tried) == {"layers.0", "layers.1"}
    assert all("does not compile" in losers(report, f"layers.{i}")["p/fast"] for i in range(4))


@pytest.mark.parametrize("column", [0, 3, 12, 15, None])
def test_where_numpy_compares_later_layers_are_sampled(monkeypatch, column) -> None:
    """The first layer in full; later the first, the last, and others elsewhere each time."""
    monkeypatch.setattr(probes, "SAMPLED_COLUMNS", 16)
    monkeypatch.setattr(probes.native, "available", lambda: False)
    site = LinearSite(path="p", n=96, k=64, mode="affine", bits=4, group_size=32, weight_dtype="uint32",
                      scales_dtype="float32", x_dtype="float32", out_dtype="float32", device="cpu")  # fmt: skip
    probe = probes.LinearProbe(site)
    layer = nn.QuantizedLinear(64, 96, bias=False, group_size=32, bits=4)
    offer = Offer("p", lambda module: module, row_invariant=True, plugin="p")

    def check() -> None:
        parts.clear()
        parts.extend(probe._columns())
        results = [(m, layer(*probe.args(m))) for m in (1, 5)]
        monkeypatch.setattr(probe, "_columns", lambda: parts)
        if column is not None:
            columns = [c for part in parts for c in range(part.start, part.stop)]
            wrong = np.zeros(96, np.float32)
            wrong[columns[column]] = 1.0
            results = [(m, y + mx.array(wrong)) for m, y in results]
        probe.check(offer, layer, results)

    parts: list[slice] = []
    assert probe._columns() == [slice(0, 96)]
    probe.thorough = False
    seen = {tuple((p.start, p.stop) for p in probe._columns()) for _ in range(20)}
    assert len(seen) > 5 and all(s[0] == (0, 4) and s[2] == (92, 96) and 4 <= s[1][0] <= 84 for s in seen)
    if column is None:
        check()
    else:
        with pytest.raises(VerificationError, match="rows 1, last row, 16 columns of 96"):
            check()


def test_race_off_uses_the_profile_only(monkeypatch) -> None:
    ran = fake_race(monkeypatch, {"fast": FAST})
    report = select(Policy(race="off"), p=offer("fast"))
    assert report.decision("a").chosen == STOCK and ran == []
    assert "never raced on this machine (race=off)" in losers(report)["p/fast"]
    select(Policy(), p=offer("fast"))
    assert select(Policy(race="off"), p=offer("fast")).decision("a").chosen == "p/fast"


def test_a_named_plugin_must_serve() -> None:
    for plugin, cause in ((toys.wrong_plugin(), "rounding bound"), (toys.raising_plugin("build"), "toy build fault"),
                          (toys.module_with(select_linear=lambda site: None), "made no offer")):  # fmt: skip
        policy = Policy(plugins="+p", deterministic=True)
        model = Two()
        with pytest.raises(PluginError, match=f"'p' was asked for and cannot serve this model: .*{cause}"):
            accelerate(model, policy, host=toys.host(policy, p=plugin))
        assert type(model.a) is nn.QuantizedLinear
    # Losing the race is no failure: never slower.
    policy = Policy(plugins="+p")
    report = accelerate(Two(), policy, host=toys.host(policy, p=toys.slow_plugin()))
    assert report.decision("a").chosen == STOCK


def test_a_real_race_finds_the_slow_one_slow() -> None:
    report = select(Policy(), p=toys.slow_plugin(0.01))
    assert report.decision("a").chosen == STOCK and "no measured win" in losers(report)["p/slow"]


def test_interrupt_during_the_race_leaves_the_model_stock() -> None:
    model, main = Two(), threading.main_thread().ident
    policy = Policy()

    def select_linear(site):
        calls = []

        def build(module):
            right = toys.dequantized(site, module)

            def call(x):
                calls.append(x)
                if len(calls) == 9:  # 3 in the verification, 4 first runs, then the race
                    signal.pthread_kill(main, signal.SIGINT)
                return right(x)

            return call

        return Offer("p", build, row_invariant=True)

    with pytest.raises(KeyboardInterrupt):
        accelerate(model, policy, host=toys.host(policy, p=toys.module_with(select_linear=select_linear)))
    assert type(model.a) is nn.QuantizedLinear and "_accel" not in model.a.__dict__
    assert model(mx.ones((1, 64))).shape == (1, 96)
    cache = os.environ["MLX_ACCEL_CACHE"]
    assert not os.path.isdir(f"{cache}/inflight") or os.listdir(f"{cache}/inflight") == []
    # And the next attempt is as good as the first.
    assert accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=offer("fine"))).decision("a").accelerated


def test_other_hooks_are_asked_and_recorded() -> None:
    asked = []

    def hook(site):
        asked.append(site)
        return Offer("toy", lambda module: None)

    model = tiny_models.build("qwen3_moe", bits=4)
    plugin = toys.module_with(fuse_moe=lambda site: hook(site), select_op=lambda site: hook(site))
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=plugin))
    moe = [s for s in asked if s.hook == "fuse_moe"]
    assert len(moe) == 2 and moe[0].d_model == 128 and moe[0].d_hidden == 96 and moe[0].n_experts == 6
    assert moe[0].bits == 4 and moe[0].uniform and moe[0].gated
    norms = [s for s in asked if s.hook == "select_op" and s.op == "rms_norm"]
    assert norms and norms[0].eps == pytest.approx(1e-6)
    decision = report.decision(moe[0].path, "fuse_moe")
    assert decision.chosen == STOCK and decision.losers[0].offer == "p/toy"
    restore(model)


def test_attention_shapes_and_drafts_are_asked_for() -> None:
    asked = []
    note = lambda site: asked.append(site)  # noqa: E731
    plugin = toys.module_with(select_attention=lambda site: note(site), verify_draft=lambda site: note(site))
    model = tiny_models.build("gpt_oss", bits=4, dtype="bfloat16")
    report = accelerate(model, Policy(race="off", activations="model"), host=toys.host(p=plugin))
    attention = [s for s in asked if s.hook == "select_attention"]
    assert [(s.q_len, s.mask) for s in attention] == [(0, "any")]
    assert {(s.n_heads, s.n_kv_heads, s.head_dim, s.has_sinks, s.q_dtype) for s in attention} == {
        (4, 2, 32, True, "bfloat16")}  # fmt: skip
    drafts = [s for s in asked if s.hook == "verify_draft"]
    assert [(s.sampler, s.vocab_size) for s in drafts] == [("greedy", 320), ("sample", 320)]
    for site in asked:
        assert report.decision(site.path, site.hook).losers[0].reason == "made no offer"
    sliding = [f.site for f in walk_calls.find_attention(tiny_models.build("gemma3"))]
    assert sliding[0].n_kv_heads == 1 and sliding[0].scale == pytest.approx(32**-0.5)


def test_memory_figures_are_the_users_own() -> None:
    mx.reset_peak_memory()
    select(Policy(), p=offer("exact"))
    assert mx.get_peak_memory() < 64 * 2**20 and mx.get_cache_memory() < 2**20


def test_the_report_is_json_with_one_decision_per_site() -> None:
    model = tiny_models.build("llama", bits=4)
    report = select(model=model, p=toys.exact_plugin())
    data = json.loads(report.to_json())
    assert len(data["decisions"]) == 15 == len({d["path"] for d in data["decisions"]})
    for d in data["decisions"]:
        assert d["chosen"] == "p/exact" and [b["rows"] for b in d["buckets"]] == [[1, 16], [17, None]]
        assert all(x["reason"] for x in d["losers"])
    assert data["counts"] == {"p/exact": 15} and data["policy"]["deterministic"] is True


def test_where_stock_cannot_run_the_offer_runs_and_the_report_quotes_stock(monkeypatch) -> None:
    how = "stock fails (ValueError: 1 is not supported)"
    monkeypatch.setattr(race_module, "race", lambda probe, modules, ours, rows, device="cpu", **_: {
        m: Timing(1e-5, 1e5, 0.0, how) for m in rows})  # fmt: skip
    decision = select(Policy(), p=offer("only")).decision("a")
    assert [(b.chosen, b.ratio, b.how) for b in decision.buckets] == [("p/only", 0.0, how)] * 2
    assert how in {x.offer: x.reason for x in decision.losers}[STOCK]


def test_what_raises_alike_on_two_layers_is_not_tried_on_the_others() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.QuantizedLinear(64, 96, bias=False, group_size=32, bits=4) for _ in range(6)]

        def __call__(self, x: mx.array) -> mx.array:
            return sum(layer(x) for layer in self.layers)

    tried = []

    def broken(site):
        def build(module):
            def call(x):
                tried.append(site.path)
                raise RuntimeError("Failed to compile kernel: k.cu(7): error: expected a ;" + "\n" * 9000)

            return call

        return Offer("broken", build, row_invariant=True)

    report = select(Policy(), Many(), p=toys.module_with(select_linear=broken))
    assert set(tried) == {"layers.0", "layers.1"}
    reasons = {losers(report, f"layers.{i}")["p/broken"] for i in range(6)}
    assert len(reasons) == 1 and "k.cu(7): error" in (reason := reasons.pop()) and len(reason) < 2000
    assert any("6 sites" in note for note in report.notes)
