"""``mlx-accel bench``: its commands and their options; what they do is in :mod:`backend_core.bench`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ..policy import Policy

OPTION_HELP = "Policy option KEY=VALUE, repeatable (as --backend-option of mlx_lm.generate)."
_FILE: Any = click.Path(dir_okay=False, path_type=Path)


class _Shape(click.ParamType):
    """``4096x4096``: output features x input features."""

    name = "NxK"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        parts = str(value).lower().split("x")
        if len(parts) == 1:
            parts = parts * 2
        if len(parts) != 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
            self.fail(f"{value!r} is not a shape such as 4096x4096 (output x input features)", param, ctx)
        return int(parts[0]), int(parts[1])


class _Numbers(click.ParamType):
    """``1,2,4``: positive numbers."""

    name = "N,N,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(p.strip().isdecimal() and int(p) > 0 for p in parts):
            self.fail(f"{value!r} is not a list of positive numbers such as 1,2,4", param, ctx)
        return tuple(int(p) for p in parts)


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that every benchmark has."""
    for option in reversed([
        click.option("--peers", type=click.Path(path_type=Path), metavar="DIR",
                     help="Build directory of llama.cpp (shared libraries): also measure ggml."),
        click.option("--json", "json_file", type=_FILE, help="Write every sample, machine, versions and command; "
                     "a plot beside it if matplotlib is installed."),
        click.option("--csv", "csv_file", type=_FILE, help="Write one line for each contender of each row."),
        click.option("--markdown", "markdown_file", type=_FILE, help="Write the table, machine, versions, command."),
        click.option("--plot", "plot_file", type=_FILE, help="Write a picture (PNG; needs matplotlib)."),
        click.option("--threads", type=click.IntRange(1, 512), help="Threads of both sides (default: all CPUs)."),
        click.option("--repeats", type=click.IntRange(1), help="Rounds [default: 9, whole models 5]."),
        click.option("--only", multiple=True, metavar="REGEX",
                     help="Only rows whose name matches, repeatable (any of them)."),
        click.option("--stock/--no-stock", default=True, show_default=True, help="Also measure stock mlx."),
        click.option("-o", "--option", "options", multiple=True, metavar="KEY=VALUE", help=OPTION_HELP),
    ]):  # fmt: skip
        command = option(command)
    return command


@contextlib.contextmanager
def _tools(peers: Path | None, threads: int | None) -> Iterator[tuple[Any, Any]]:
    """(the peer or None, the limits) with the number of threads in force."""
    from .. import native
    from ..bench.floors import Floors
    from ..bench.peer import Ggml
    from ..errors import AccelError

    before = os.environ.get("MLX_ACCEL_THREADS")
    if threads:
        # The variable is what child processes and the profile's key go by.
        os.environ["MLX_ACCEL_THREADS"] = str(threads)
    if not native.available():
        raise AccelError(f"benchmarks need CPU kernels: {native.status().reason}")
    module = native.get()
    default = int(module.threads())
    if threads:
        module.set_threads(threads)
    ggml = None
    try:
        ggml = Ggml(peers.expanduser().absolute(), int(module.threads())) if peers else None
        yield ggml, Floors()
    finally:
        if ggml is not None:
            ggml.close()
        if threads:
            os.environ.pop("MLX_ACCEL_THREADS")
            if before is not None:
                os.environ["MLX_ACCEL_THREADS"] = before
            module.set_threads(default)


def _run(name: str, work: list[Any], bench_it: Callable[..., Any], ggml: Any, floors: Any, measured: Any, policy: Any,
         **files: Path | None) -> None:  # fmt: skip
    """Measure, with a bar, print and write."""
    import dataclasses

    from rich.progress import Progress

    from ..bench import output
    from ..bench.measure import Neighbours
    from ..errors import AccelError
    from .tables import _console

    for file in files.values():
        if file is not None and not file.parent.is_dir():
            raise AccelError(f"{file} cannot be written: {file.parent} is not a directory")
    if not work:
        raise AccelError("no row is left: --only and the other options leave nothing to measure")
    others = Neighbours()
    with Progress(console=_console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(work))
        rows = bench_it(work, measured, policy, ggml, floors, lambda row: progress.advance(task))
    data = output.result(name, rows, dataclasses.asdict(measured), f"ggml {ggml.release}" if ggml else "", others())
    output.print_table(rows, data)
    output.write(data, rows, **files)


def _wanted(names: tuple[str, ...], name: str) -> bool:
    import re

    try:
        return not names or any(re.search(text, name, re.IGNORECASE) for text in names)
    except re.error as error:
        raise click.BadParameter(f"--only: {error}") from error


@click.group()
def bench() -> None:
    """Measure on this machine, side by side in one run."""


@bench.command()
@_common
@click.option("--shape", "shapes", type=_Shape(), multiple=True, help="Output x input features [default: 4096x4096].")
@click.option("--bits", type=_Numbers(), help="Affine weights of so many bits (with --group-size).")
@click.option("--group-size", type=_Numbers(), help="[default: 128 up to 2 bits, else 64]")
@click.option("--dense", multiple=True, type=click.Choice(["float16", "bfloat16", "float32"]), help="Dense weights.")
@click.option("--scales", type=click.Choice(["float16", "bfloat16", "float32"]), default="float16", show_default=True,
              help="dtype of scales and biases.")  # fmt: skip
@click.option("--sym", is_flag=True, help="Biases that follow from the scales, so that they need not be read.")
@click.option("-m", "--rows", type=_Numbers(), default="1,2,4,8,16,512", show_default=True, help="Rows (M).")
@click.option("--peer-types", metavar="TYPE,...", help="ggml types to compare with [default: by bits].")
@click.option("--activations", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32",
              show_default=True, help="dtype of the activations; float32 is what accelerated models run.")  # fmt: skip
@click.option("--weights-mb", type=click.IntRange(1), default=512, show_default=True,
              help="Weights of all copies together; more than caches hold.")  # fmt: skip
def linear(peers: Path | None, threads: int | None, repeats: int | None, only: tuple[str, ...], stock: bool,
           options: tuple[str, ...], shapes: tuple[tuple[int, int], ...], bits: tuple[int, ...] | None,
           group_size: tuple[int, ...] | None, dense: tuple[str, ...], scales: str, sym: bool, rows: tuple[int, ...],
           peer_types: str | None, activations: str, weights_mb: int, **files: Path | None) -> None:  # fmt: skip
    """Linear layers: ours, stock, ggml and the machine's limits.

    Without --bits and --dense: 2-bit g128, 1-bit g128, 4-bit g64, float16 and bfloat16.
    """
    from ..bench import linear as bench_module

    specs = bench_module.specs(shapes or ((4096, 4096),), bits, group_size, dense, scales, sym)
    kinds = bench_module.peer_types(peer_types)
    work = [
        bench_module.Work(spec, m, kinds if kinds is not None else bench_module.peers_of(spec))
        for spec in specs
        for m in rows
        if _wanted(only, f"{spec.name} M={m}")
    ]
    measured = bench_module.Options(
        repeats=repeats or 9, weights_bytes=weights_mb << 20, x_dtype=activations, stock=stock
    )
    with _tools(peers, threads) as (ggml, floors):
        _run("linear", work, bench_module.bench_linear, ggml, floors, measured, Policy.from_options(options), **files)


@bench.command("bonsai_decode_bench")
@_common
@click.option("-m", "--rows", type=_Numbers(), default="1,2,3,4,5", show_default=True, help="Rows (M).")
@click.option("--bits", type=_Numbers(), default="1,2", show_default=True)
@click.option("--group-size", type=_Numbers(), default="64,128", show_default=True)
@click.option("--scales", type=click.Choice(["float16", "bfloat16", "float32"]), default="float16", show_default=True,
              help="dtype of scales and biases.")  # fmt: skip
@click.option("--sym", is_flag=True, help="Biases that follow from the scales; their bytes do not count.")
@click.option("--weights-mb", type=click.IntRange(1), default=512, show_default=True, help="As in bench linear.")
def bonsai_decode_bench(peers: Path | None, threads: int | None, repeats: int | None, only: tuple[str, ...],
                        stock: bool, options: tuple[str, ...], rows: tuple[int, ...], bits: tuple[int, ...],
                        group_size: tuple[int, ...], scales: str, sym: bool, weights_mb: int,
                        **files: Path | None) -> None:  # fmt: skip
    """Preset: the projections of Qwen3.6-27B and Qwen3-8B in 1 and 2 bits at 1 to 5 rows.

    Weights are random and never zero. Names for --only look like "Qwen3-8B q_proj/o_proj 1-bit g64 4096x4096 M=1".
    """
    from ..bench import linear as bench_module
    from ..bench import presets

    bench_module.specs(((128, 128),), bits, group_size)  # refuses what mlx has not
    work = [
        presets.labelled(item, layer)
        for layer, item in presets.bonsai_decode_bench(rows, bits, group_size, scales, sym)
        if _wanted(only, f"{layer} {item.spec.name} M={item.rows}")
    ]
    measured = bench_module.Options(repeats=repeats or 5, weights_bytes=weights_mb << 20, stock=stock)
    with _tools(peers, threads) as (ggml, floors):
        _run("bonsai_decode_bench", work, bench_module.bench_linear, ggml, floors, measured,
             Policy.from_options(options), **files)  # fmt: skip


class _HeadsType(click.ParamType):
    """``32/8x128``: heads / KV heads x head_dim."""

    name = "H/KVxD"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int, int]:
        import re

        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d+)/(\d+)x(\d+)", str(value))
        numbers = tuple(int(g) for g in found.groups()) if found else (0, 0, 0)
        if not all(numbers) or numbers[0] % numbers[1]:
            self.fail(f"{value!r} is not heads/KV heads x head_dim such as 32/8x128", param, ctx)
        return numbers  # type: ignore[return-value]


@bench.command()
@_common
@click.option("--heads", type=_HeadsType(), multiple=True, help="[default: 9/3x64, 16/8x128, 32/8x128]")
@click.option("--length", type=_Numbers(), default="1,4,16,512", show_default=True, help="Queries (L).")
@click.option("--depth", type=_Numbers(), default="64,512,4096,8160", show_default=True, help="Tokens in the cache.")
@click.option("--activations", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32",
              show_default=True, help="dtype of the queries.")  # fmt: skip
@click.option("--kv", type=click.Choice(["float32", "float16", "bfloat16"]), default="float16", show_default=True,
              help="dtype of the cache.")  # fmt: skip
@click.option("--weights-mb", type=click.IntRange(1), default=512, show_default=True,
              help="Keys and values of all copies together; more than caches hold.")  # fmt: skip
def attention(peers: Path | None, threads: int | None, repeats: int | None, only: tuple[str, ...], stock: bool,
              options: tuple[str, ...], heads: tuple[tuple[int, int, int], ...], length: tuple[int, ...],
              depth: tuple[int, ...], activations: str, kv: str, weights_mb: int,
              **files: Path | None) -> None:  # fmt: skip
    """Attention over a KV cache: ours, stock, ggml's flash attention and the machine's limits."""
    from ..bench import attention as bench_module

    work = [
        item
        for h in ([bench_module.Heads(*x) for x in heads] or bench_module.DEFAULT_HEADS)
        for d in depth
        for m in length
        if _wanted(only, f"{(item := bench_module.Work(h, m, d)).name} L={m}")
    ]
    measured = bench_module.AttentionOptions(repeats=repeats or 9, weights_bytes=weights_mb << 20, x_dtype=activations,
                                             kv_dtype=kv, stock=stock)  # fmt: skip
    with _tools(peers, threads) as (ggml, floors):
        _run("attention", work, bench_module.bench_attention, ggml, floors, measured, Policy.from_options(options),
             **files)  # fmt: skip


@bench.command()
@_common
@click.option("-m", "--rows", type=_Numbers(), default="1,512", show_default=True, help="Rows (M).")
@click.option("--activations", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32",
              show_default=True, help="dtype of the activations.")  # fmt: skip
def ops(peers: Path | None, threads: int | None, repeats: int | None, only: tuple[str, ...], stock: bool,
        options: tuple[str, ...], rows: tuple[int, ...], activations: str, **files: Path | None) -> None:  # fmt: skip
    """Norms, rotary embeddings and gated activations: ours, stock and ggml."""
    from ..bench import ops as bench_module

    work = [item for item in bench_module.default_work(rows) if _wanted(only, f"{item.name} M={item.rows}")]
    measured = bench_module.Options(repeats=repeats or 9, x_dtype=activations, stock=stock)
    with _tools(peers, threads) as (ggml, floors):
        _run("ops", work, bench_module.bench_ops, ggml, floors, measured, Policy.from_options(options), **files)


@bench.command()
@_common
@click.option("--model", help="Model directory or repository, or SmolLM2, the demo model [default].")
@click.option("--scales", type=click.Choice(["fp32", "fp16"]),
              help="Scales of the demo model [default: fp32, with --peers fp16].")  # fmt: skip
@click.option("--gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="The peer's file of a --model of your own.")  # fmt: skip
@click.option("--random", "random_models", multiple=True, type=click.Choice(["qwen3-0.6b", "qwen3-1.7b"]),
              help="Also models of this shape with random weights, 4-bit and 2-bit, repeatable.")  # fmt: skip
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, help="Without --peers.")
@click.option("--tokens", type=click.IntRange(2), default=32, show_default=True, help="To decode, without --peers.")
def generate(peers: Path | None, threads: int | None, repeats: int | None, only: tuple[str, ...], stock: bool,
             options: tuple[str, ...], model: str | None, scales: str | None, gguf: Path | None,
             random_models: tuple[str, ...], prompt_tokens: int, tokens: int,
             **files: Path | None) -> None:  # fmt: skip
    """Prompt and decode speed of whole models, interleaved.

    Plainly: one model, stock against accelerated. With --peers, --random, --only or any option of the harness:
    prompt and decode at several depths, also while another process is busy, against llama-bench if --peers.
    """
    if model is not None and model.lower() == "smollm2":
        model = None
    policy = Policy.from_options(options)
    written = any(files[f"{kind}_file"] for kind in ("csv", "markdown", "plot"))
    if not (peers or random_models or only or threads or written) and stock:
        from ..bench.stock_generate import bench_generate

        bench_generate(model, scales or "fp32", prompt_tokens, tokens, repeats or 3, files["json_file"], policy)
        return
    from ..bench import generate as bench_module

    with _tools(peers, threads) as (ggml, floors):
        sources = _sources(model, scales or "fp16", gguf, random_models, ggml)
        lines = [name for s in sources for t in s.tasks if _wanted(only, name := f"{s.name} {t.name}")]
        measured = bench_module.Options(repeats=repeats or 5, stock=stock, threads=_threads())

        def bench_it(work: Any, measured: Any, policy: Any, ggml: Any, floors: Any, progress: Any) -> Any:
            return bench_module.bench_models(
                sources, measured, policy, peers, floors, progress, set(lines).__contains__
            )

        _run("generate", lines, bench_it, ggml, floors, measured, policy, **files)


def _threads() -> int:
    from .. import native

    return int(native.get().threads())


def _sources(model: str | None, scales: str, gguf: Path | None, random_models: tuple[str, ...], ggml: Any) -> list[Any]:
    """The models of one run: the given one or the demo model, then random ones."""
    from ..bench import generate as bench_module
    from ..errors import AccelError
    from . import models

    sources = []
    if model is not None:
        if ggml is not None and gguf is None:
            raise AccelError("--model with --peers also needs --gguf, the same model for llama.cpp")
        tasks = tuple(t for t in bench_module.DEMO_TASKS if t.depth == 0)
        sources.append(bench_module.Source(Path(model).name, tasks, lambda: models.load_stock(model),
                                           (lambda: gguf) if gguf else None, gguf.stem if gguf else ""))  # fmt: skip
    else:
        from ..demo.model import demo_model_dir, find_source

        sources.append(bench_module.Source("SmolLM2-135M", bench_module.DEMO_TASKS,
                                           lambda: models.load_stock(str(demo_model_dir(scales))),
                                           lambda: find_source().path, "Q4_1"))  # fmt: skip
    return sources + bench_module.random_sources(random_models, ggml)
