"""``mlx-accel bench generate`` without a peer: one model, stock and accelerated, interleaved."""

from __future__ import annotations

import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .. import core, machine
from ..policy import Policy


def bench_generate(model_name: str | None, scales: str, prompt_tokens: int, tokens: int, repeats: int,
                   json_file: Path | None, policy: Policy) -> dict[str, Any]:  # fmt: skip
    """Prompt and decode tokens per second, stock and accelerated, and whether greedy tokens agree.

    Stock half precision on the CPU makes about 0.3 tok/s; there it is measured over at most 4 prompt and
    4 new tokens, and greedy text is compared over those.
    """
    import mlx.core as mx

    from ..cli import models
    from ..cli.tables import _console
    from ..walk import activations_dtype

    if model_name is None:
        from ..demo.model import demo_model_dir

        model_name = str(demo_model_dir(scales))
    model = models.load_stock(model_name)
    slow = machine.default_device() == "cpu" and activations_dtype(model) in ("float16", "bfloat16")
    vocab = _vocab_size(model)
    prompt = [(7 * i * i + 3 * i + 1) % min(vocab, 30000) for i in range(prompt_tokens)]
    samples: dict[str, dict[str, list[float]]] = {s: {"prompt": [], "decode": []} for s in ("stock", "accel")}
    texts: dict[str, list[int]] = {}
    report = None
    with Progress(console=_console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=2 * repeats)
        for i in range(repeats):
            # ABBA, so that a drift of the machine hits both.
            for side in ("stock", "accel") if i % 2 == 0 else ("accel", "stock"):
                if side == "accel":
                    report = core.accelerate(model, policy)
                else:
                    core.restore(model)
                few = slow and side == "stock"
                if few and samples["stock"]["decode"]:
                    progress.advance(task)
                    continue
                p, d, text = _one_run(model, prompt[:4] if few else prompt, min(tokens, 4) if few else tokens)
                samples[side]["prompt"].append(p)
                samples[side]["decode"].append(d)
                texts[side] = text
                if few:
                    core.accelerate(model, policy)
                    _, _, texts["accel_few"] = _one_run(model, prompt[:4], min(tokens, 4))
                progress.advance(task)
    core.restore(model)
    mx.clear_cache()
    assert report is not None
    other = texts.get("accel_few", texts["accel"])
    result: dict[str, Any] = {
        "model": Path(model_name).name, "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_model(),
        "device": machine.default_device(), "threads": len(machine.affinity()), "python": platform.python_version(),
        "mlx": machine.version("mlx"), "mlx_lm": machine.version("mlx-lm"), "mlx_accel": machine.version("mlx-accel"),
        "prompt_tokens": prompt_tokens, "tokens": tokens, "stock_measured_over": [4, 4] if slow else None,
        "same_greedy_tokens": texts["stock"] == other, "report": report.line(), "rows": {},
    }  # fmt: skip
    from rich.table import Table

    table = Table("", "stock tok/s", "accel tok/s", "ratio", title=f"{result['model']}, {result['cpu']}, "
                  f"{result['threads']} CPUs, mlx {result['mlx']}")  # fmt: skip
    for phase in ("prompt", "decode"):
        stock, accel = samples["stock"][phase], samples["accel"][phase]
        ratio = statistics.median(accel) / statistics.median(stock)
        result["rows"][phase] = {"stock": stock, "accel": accel, "ratio": ratio}
        table.add_row(f"{phase} ({prompt_tokens if phase == 'prompt' else tokens} tokens)", _cell(stock), _cell(accel),
                      f"{ratio:.1f}x")  # fmt: skip
    console = _console()
    console.print(table)
    console.print(f"same greedy tokens: {'yes' if result['same_greedy_tokens'] else 'no'}"
                  + (" (stock half precision, over 4 tokens)" if slow else ""))  # fmt: skip
    console.print(report.line(), markup=False)
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _one_run(model: Any, prompt: list[int], tokens: int) -> tuple[float, float, list[int]]:
    """(prompt tok/s, decode tok/s, tokens) of one greedy generation."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    begin = time.perf_counter()
    first = 0.0
    text: list[int] = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens):
        text.append(int(token))
        if len(text) == 1:
            first = time.perf_counter()
    end = time.perf_counter()
    return len(prompt) / (first - begin), (len(text) - 1) / max(end - first, 1e-9), text


def _vocab_size(model: Any) -> int:
    config = getattr(model, "args", None)
    return int(getattr(config, "vocab_size", 0) or 1000)


def _cell(values: list[float]) -> str:
    spread = f" ({min(values):.1f}..{max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.1f}{spread}"
