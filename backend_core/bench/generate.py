"""``mlx-accel bench generate --peers DIR``: whole models, ours, stock and llama.cpp, interleaved.

Ours is ``generate_step`` of mlx-lm as a program calls it, greedy sampling included; llama-bench evaluates its
model without sampling, in a process of its own between two samples of ours. All samples are seconds a token.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import core, machine
from ..policy import Policy
from . import llama_bench
from .floors import Floors
from .measure import Contender, Row, Series, rounds
from .random_models import SHAPES, gguf_file, mlx_model

#: Stock in half precision makes a token in seconds.
_STOCK_TOKENS = 3
_PREFILL_STEP = 512
#: llama.cpp's fused attention is the slower one on some processors: the faster setting counts.
_FLASH = ("on", "off")


@dataclass(frozen=True)
class Task:
    """One line: so many tokens of a phase behind so many others.

    phase
        ``"prompt"`` or ``"decode"``.
    busy
        True: another process computes on one CPU meanwhile.
    """

    phase: str
    tokens: int
    depth: int = 0
    busy: bool = False

    @property
    def name(self) -> str:
        what = f"prompt of {self.tokens}" if self.phase == "prompt" else f"decode {self.tokens}"
        behind = f" at {self.depth}" if self.depth else ""
        return f"{what}{behind}{', one CPU busy' if self.busy else ''}"


#: What is measured of the demo model, whose context is 8192 tokens.
DEMO_TASKS = (
    Task("decode", 64), Task("prompt", 512), Task("decode", 32, 4096), Task("decode", 32, 8160),
    Task("prompt", 512, 4096), Task("decode", 32, busy=True), Task("prompt", 512, busy=True),
)  # fmt: skip
RANDOM_TASKS = (Task("decode", 32), Task("prompt", 512))
#: bits, group_size and the peer's type of random models.
FORMATS = ((4, 64, "q4_K"), (2, 128, "tq2_0"))


@dataclass(frozen=True)
class Source:
    """A model on both sides.

    load
        () -> the model, stock.
    gguf
        () -> the peer's file, None without a peer.
    kind
        The peer's type.
    stock
        False where stock would take minutes.
    """

    name: str
    tasks: Sequence[Task]
    load: Callable[[], Any]
    gguf: Callable[[], Path] | None = None
    kind: str = ""
    stock: bool = True


@dataclass
class Options:
    """How to measure; `wanted` filters lines by name."""

    repeats: int = 5
    stock: bool = True
    threads: int = 1
    settle: float = 0.02


def random_sources(names: Sequence[str], ggml: Any) -> list[Source]:
    """The random models of these shapes, in each format."""
    found = []
    for name in names:
        shape = SHAPES[name]
        for bits, group, kind in FORMATS:
            load = _bound(mlx_model, shape, bits, group)
            gguf = _bound(gguf_file, shape, kind, ggml) if ggml is not None else None
            found.append(Source(f"{name} {bits}-bit g{group}", RANDOM_TASKS, load, gguf, kind, stock=False))
    return found


def _bound(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: function(*args)


def bench_models(sources: Sequence[Source], options: Options, policy: Policy, peers: Path | None = None,
                 floors: Floors | None = None, progress: Callable[[Row], None] | None = None,
                 wanted: Callable[[str], bool] = lambda name: True) -> list[Row]:  # fmt: skip
    """One row per task of each source whose name is wanted. `progress` sees each as it is done."""
    import mlx.core as mx

    result = []
    for source in sources:
        tasks = [t for t in source.tasks if wanted(f"{source.name} {t.name}")]
        if not tasks:
            continue
        bench = _Model(source, options, policy, peers, floors)
        for task in tasks:
            row = bench.measure(task)
            result.append(row)
            if progress is not None:
                progress(row)
        core.restore(bench.model)
        del bench
        mx.clear_cache()
    return result


class _Model:
    """One source while it is measured."""

    def __init__(self, source: Source, options: Options, policy: Policy, peers: Path | None,
                 floors: Floors | None) -> None:  # fmt: skip
        self.source, self.options, self.policy, self.peers, self.floors = source, options, policy, peers, floors
        self.model = source.load()
        self.gguf = source.gguf() if source.gguf is not None and peers is not None else None
        self.depth: tuple[int, Any] = (0, None)
        self.accelerated = False

    def measure(self, task: Task) -> Row:
        """All samples of one task."""
        row = Row(f"{self.source.name} {task.name}", 1 if task.phase == "decode" else task.tokens,
                  facts={"phase": task.phase, "tokens": task.tokens, "depth": task.depth, "busy": task.busy,
                         "unit": "token"})  # fmt: skip
        row.macs = self._macs(task)
        with _neighbour(task.busy):
            self._measure(task, row)
        return row

    def _measure(self, task: Task, row: Row) -> None:
        stock = Series("stock", "stock", "mlx-lm")
        if self.options.stock and self.source.stock and task.depth == 0:
            core.restore(self.model)
            self._stock(task, stock)
        report = core.accelerate(self.model, self.policy)
        ours = Series("ours", "ours", report.summary(), self._bytes(task))
        contenders = [Contender(ours, lambda: self._sample(task))]
        row.series = [ours, stock]
        if self.gguf is not None and self.peers is not None:
            if task.depth:
                # The tokens before cost it more than the measured ones: one process for all samples, between ours.
                self._sample(task)
                rounds(contenders, (self.options.repeats + 1) // 2, self.floors, row, self.options.settle)
                tried = {flag: self._peer(task, min(self.options.repeats, 3), flag) for flag in _FLASH}
                rounds(contenders, self.options.repeats // 2, self.floors, row, self.options.settle)
            else:
                tried = {flag: self._peer(task, 1, flag) for flag in _FLASH}
            best = min(_FLASH, key=lambda flag: statistics.median(tried[flag]))
            peer = Series(self.source.kind, "peer", f"llama-bench, {self.source.kind}, -fa {best}")
            row.series.append(peer)
            row.facts["flash_attention"] = tried
            if task.depth:
                peer.samples += tried[best]
                return
            contenders.append(Contender(peer, lambda: self._peer(task, 1, best)[0]))
        self._sample(task)  # warm
        rounds(contenders, self.options.repeats, self.floors, row, self.options.settle)

    def _peer(self, task: Task, repeats: int, flash: str) -> list[float]:
        assert self.gguf is not None and self.peers is not None
        prompt, tokens = (task.tokens, 0) if task.phase == "prompt" else (0, task.tokens)
        return llama_bench.run(self.peers, self.gguf, self.options.threads, prompt=prompt, tokens=tokens,
                               depth=task.depth, repeats=repeats, extra=("-fa", flash))  # fmt: skip

    def _stock(self, task: Task, series: Series) -> None:
        """Two samples, of few tokens where stock is slow."""
        from ..walk import activations_dtype

        slow = machine.default_device() == "cpu" and activations_dtype(self.model) in ("float16", "bfloat16")
        count = min(task.tokens, _STOCK_TOKENS) if slow else task.tokens
        if count < task.tokens:
            series.note = f"{count} of {task.tokens} tokens"
        for _ in range(1 if slow else 2):
            series.samples.append(self._sample(Task(task.phase, count)))

    def _bytes(self, task: Task) -> int:
        """Bytes that a token of a decode step must read: all weights, and keys and values in the model's dtype."""
        import mlx.utils

        if task.phase == "prompt":
            return 0
        arrays: Any = mlx.utils.tree_flatten(self.model.parameters())
        weights = sum(int(a.nbytes) for _, a in arrays)
        args = self.model.args
        head_dim = getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads
        per_token = 2 * 2 * args.num_hidden_layers * args.num_key_value_heads * head_dim
        return weights + per_token * (task.depth + task.tokens // 2)

    def _macs(self, task: Task) -> int:
        """Multiply-adds of a token: all matrices, and attention to the tokens before it. A prompt's head runs once."""
        from ..walk import find_linears

        args = self.model.args
        found = [f.site for f in find_linears(self.model)]
        head = max(found, key=lambda s: s.n, default=None) if task.phase == "prompt" else None
        matrices = sum(s.batch * s.n * s.k for s in found if s is not head)
        head_dim = getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads
        seen = task.depth + task.tokens // 2
        return int(matrices + 2 * args.num_hidden_layers * args.num_attention_heads * head_dim * seen)

    def _cache(self, depth: int) -> Any:
        """A cache with so many tokens in it; the last one is kept and trimmed."""
        from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

        have, cache = self.depth
        if cache is not None and depth and have == depth and can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, cache[0].offset - depth)
            return cache
        self.depth = (0, None)
        cache = make_prompt_cache(self.model)
        if depth:
            import mlx.core as mx

            tokens = mx.array(_tokens(self.model, depth))
            for i in range(0, depth, _PREFILL_STEP):
                self.model(tokens[None, i : i + _PREFILL_STEP], cache=cache)
                mx.eval([c.state for c in cache])
            self.depth = (depth, cache)
        return cache

    def _sample(self, task: Task) -> float:
        """Seconds a token."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        cache = self._cache(task.depth)
        if task.phase == "prompt":
            prompt, count = mx.array(_tokens(self.model, task.tokens)), 1
        else:
            # The first token comes from the prompt's last one, and is not counted.
            prompt, count = mx.array(_tokens(self.model, 1)), task.tokens
        mx.eval(prompt)
        begin = time.perf_counter()
        first = begin
        made = 0
        steps = generate_step(prompt, self.model, max_tokens=count, prompt_cache=cache, prefill_step_size=_PREFILL_STEP)
        for _ in steps:
            made += 1
            if made == 1:
                first = time.perf_counter()
        end = time.perf_counter()
        return (first - begin) / task.tokens if task.phase == "prompt" else (end - first) / max(made - 1, 1)


def _tokens(model: Any, count: int) -> list[int]:
    vocab = int(getattr(getattr(model, "args", None), "vocab_size", 0) or 1000)
    return [(7 * i * i + 3 * i + 1) % min(vocab, 30000) for i in range(count)]


@contextlib.contextmanager
def _neighbour(busy: bool) -> Iterator[None]:
    """Within the block another process computes on one of our CPUs, if `busy`."""
    if not busy:
        yield
        return
    cpu = machine.affinity()[-1]
    code = f"import os\nhasattr(os, 'sched_setaffinity') and os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, env={**os.environ})
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()
