"""Whole models on a GPU host, from a source tree: ``mlx_lm.generate --backend accel`` next to stock.

    python tools/gpu_generate.py --out DIR

Needs mlx with CUDA (or Metal) and mlx-lm in this Python, pip, scikit-build-core, cmake and ninja. Nothing is
downloaded.

1. Installs mlx-accel, without its native module if ``--native`` names none, and the plugin bonsai_qmv without CPU
   kernels, into a directory of its own, and puts that on the path of everything below as an installation would be.
2. Makes random models of Qwen3-0.6B's shape in 2 and 1 bits (groups of 128). The embedding of the 1-bit model is
   float16, since mlx cannot look up 1-bit rows on CUDA.
3. Runs the command ``mlx_lm.generate``: accelerated, and accelerated with remembered races.
4. In one process: what runs where and why, with the times of the races; where the seconds of the selection went; what
   a call costs the host; tokens per second of stock, of what the races chose, and of all offers without a race, in
   turns. Then it compares with float32: greedy tokens, and the logits at each token of the float32 text. The float32
   model is one of dense decoded weights: stock has no kernel of 1 bit on CUDA.
5. The command once more, stock.

One model takes 150 seconds at most. Results go to DIR/gpu_generate.json and .md. ``--tiny --any-device`` runs a model
of two layers wherever mlx runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GROUP = 128
#: Layers, hidden size, intermediate size, heads, key and value heads, words.
QWEN3 = (28, 1024, 3072, 16, 8, 151936)
TINY = (2, 256, 512, 4, 2, 2048)
PROMPT = 40


class Run:
    """What was found so far, written after every step, and how much time is left."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.end = out, time.time() + seconds
        self.lines: list[str] = []
        self.results: dict[str, Any] = {}

    def left(self) -> float:
        return self.end - time.time()

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)
        (self.out / "gpu_generate.md").write_text("\n".join(self.lines) + "\n")

    def keep(self, name: str, value: Any) -> None:
        self.results[name] = value
        (self.out / "gpu_generate.json").write_text(json.dumps(self.results, indent=1))


def command(run: Run, arguments: list[str], environment: dict[str, str]) -> tuple[int, str, float]:
    """(exit status, what it printed, seconds); it is ended when time is over."""
    begin = time.time()
    try:
        done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=max(run.left(), 5), cwd=run.out)  # fmt: skip
        return done.returncode, done.stdout, time.time() - begin
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        return 124, text.decode(errors="replace") if isinstance(text, bytes) else text, time.time() - begin


def install(run: Run, site: Path, gpu: bool, native: Path | None) -> dict[str, str]:
    """Install into `site`, with the native module `native`; returns the environment in which it is installed."""
    environment = dict(os.environ)
    paths = [str(site), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment.update(
        PYTHONPATH=os.pathsep.join(paths), MLX_ACCEL_CACHE=str(site / "cache"), MLX_ENABLE_TF32="0",
        MLX_ACCEL_BUILD_NATIVE="OFF",
    )  # fmt: skip
    if gpu:
        # No compiler for CPU kernels: a minute less.
        environment.update(CXX="/no/compiler", CC="/no/compiler")
    environment.pop("MLX_ACCEL_NO_HOOK", None)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation",
           "--upgrade", "--target", str(site)]  # fmt: skip
    for package in (".", "plugins/bonsai_qmv"):
        # A copy, so that nothing is left behind in the source tree.
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "source"
            ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "tests", "docs", ".whl", ".gl")
            shutil.copytree(ROOT / package, copy, ignore=ignored)
            status, text, seconds = command(run, [*pip, str(copy)], environment)
        if status:
            run.say(text[-3000:])
            raise SystemExit(f"pip install {package} failed with {status}")
        run.say(f"installed {package} ({seconds:.0f} s)")
    if native is not None:
        shutil.copy(native, site / "backend_core" / "_native.so")
    # A directory on PYTHONPATH is not one whose .pth files Python reads; this makes it one.
    (site / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
    return environment


# Models


def write_model(folder: Path, bits: int, dimensions: tuple[int, ...]) -> None:
    """A random Qwen3 in `bits` bits with float16 scales, as mlx-lm reads it."""
    import mlx.core as mx
    import mlx.nn as nn
    import numpy as np
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3

    layers, hidden, intermediate, heads, kv_heads, words = dimensions
    tied = bits != 1
    config = {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128, "vocab_size": words,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": tied,
    }  # fmt: skip
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))

    def chosen(path: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and (tied or not isinstance(module, nn.Embedding))

    nn.quantize(model, group_size=GROUP, bits=bits, class_predicate=chosen)  # lazy: replaced below
    rng = np.random.default_rng(3)
    for _, module in model.named_modules():
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            values = rng.integers(0, 1 << 32, module.weight.shape, dtype=np.uint32)
            if bits == 2:  # code 3 does not occur in ternary weights: turn it into 1
                values &= ~((values & (values >> 1) & np.uint32(0x55555555)) << np.uint32(1))
            scales = ((rng.random(module.scales.shape, dtype=np.float32) + 1) * (0.06 / 2**bits)).astype(np.float16)
            module.weight, module.scales = mx.array(values), mx.array(scales)
            module.biases = mx.array((-scales * (1.0 if bits == 2 else 0.5)).astype(np.float16))
        elif isinstance(module, nn.Embedding):
            module.weight = mx.array((0.02 * rng.standard_normal(module.weight.shape)).astype(np.float16))
        elif isinstance(module, nn.RMSNorm):
            module.weight = mx.ones(module.weight.shape, mx.float16)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    quantization = {"group_size": GROUP, "bits": bits} | ({} if tied else {"model.embed_tokens": False})
    (folder / "config.json").write_text(json.dumps(config | {"quantization": quantization, "eos_token_id": 0}))
    write_tokenizer(folder, words)


def write_tokenizer(folder: Path, words: int) -> None:
    """Words ``w0``, ``w1``, ...; ``w0`` ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0", "model_max_length": 4096}))  # fmt: skip


def prompt_tokens(words: int) -> list[int]:
    return [(7 * i * i + 3 * i + 2) % (words - 2) + 2 for i in range(PROMPT)]


# The command


def generate(run: Run, label: str, model: Path, words: int, tokens: int, environment: dict[str, str],
             *options: str) -> dict[str, Any]:  # fmt: skip
    """One ``mlx_lm.generate``: its speeds, what it wrote, and the report line."""
    prompt = " ".join(f"w{t}" for t in prompt_tokens(words))
    arguments = [sys.executable, "-m", "mlx_lm.generate", "--model", str(model), "--prompt", prompt,
                 "--ignore-chat-template", "--max-tokens", str(tokens), "--temp", "0", *options]  # fmt: skip
    status, text, seconds = command(run, arguments, environment)
    (run.out / f"{model.name}-{label}.log").write_text(text)
    found: dict[str, Any] = {"status": status, "seconds": round(seconds, 1)}
    for name in ("Prompt", "Generation"):
        if match := re.search(rf"{name}: (\d+) tokens, ([\d.]+) tokens-per-sec", text):
            found[name.lower()] = {"tokens": int(match.group(1)), "tokens_per_s": float(match.group(2))}
    found["words"] = re.findall(r"\bw\d+\b", text.split("==========")[1]) if text.count("==========") > 1 else []
    found["report"] = next((line for line in text.splitlines() if line.startswith("[accel]")), "")
    speed = found.get("generation", {}).get("tokens_per_s")
    if status or speed is None:
        found["error"] = text.strip().splitlines()[-1:] or ["(nothing)"]
        run.say(f"- {label}: exit status {status} after {seconds:.0f} s: {found['error'][0][:300]}")
    else:
        run.say(f"- {label}: {found['generation']['tokens']} tokens, {speed:.1f} tokens/s, {seconds:.0f} s in all")
    if found["report"]:
        run.say(f"  {found['report']}")
    return found


# One process: speed in turns, and agreement with float32


def greedy(model: Any, prompt: list[int], tokens: int) -> tuple[list[int], float]:
    """(tokens, tokens per second after the first)."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    text: list[int] = []
    first = 0.0
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens):
        text.append(int(token))
        if len(text) == 1:
            first = time.perf_counter()
    return text, (len(text) - 1) / max(time.perf_counter() - first, 1e-9)


def logits_along(model: Any, prompt: list[int], text: list[int]) -> Any:
    """(tokens, words) float32: what the model says before each token of `text`, one token at a time."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    found = []
    for piece in (prompt, *([t] for t in text[:-1])):
        y = model(mx.array([piece]), cache=cache)[0, -1].astype(mx.float32)
        mx.eval(y)
        found.append(np.array(y))
    return np.stack(found)


def dense(model: Any) -> Any:
    """The model with its quantized layers decoded to float32, by plain operations."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_unflatten

    made = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            bits = module.bits
            shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
            codes = (module.weight[..., None] >> shifts) & mx.array((1 << bits) - 1, mx.uint32)
            codes = codes.reshape(*module.scales.shape, module.group_size).astype(mx.float32)
            w = codes * module.scales[..., None] + module.biases[..., None]
            layer = nn.Embedding(1, 1) if isinstance(module, nn.QuantizedEmbedding) else nn.Linear(1, 1, bias=False)
            layer.weight = w.reshape(module.weight.shape[0], -1).astype(mx.float32)
            mx.eval(layer.weight)
            made.append((path, layer))
    model.update_modules(tree_unflatten(made))
    return model


def timed(seconds: dict[str, float]) -> None:
    """From now on the parts of selections add what they take to `seconds`."""
    from backend_core import race, select
    from backend_core.simt import nvrtc

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

        setattr(module, name, call)

    for module, name in ((select, "build"), (select, "verify"), (race, "race"), (nvrtc, "compile_text")):
        watch(module, name)


def why(report: Any) -> list[str]:
    """One line per kind of layer and reason, with the times of its race."""
    from backend_core import paths

    try:
        environments = json.loads(paths.profile_path().read_text())["environments"]
        races = max(environments.values(), key=lambda e: e.get("when", 0))["races"]
    except (OSError, ValueError, KeyError):
        races = {}
    lines: dict[str, int] = {}

    def time_of(seconds: float) -> str:
        # What fails has a time that nothing exceeds.
        return f"{seconds * 1e6:.1f} us" if seconds < 1000 else "fails"

    for d in report.decisions:
        losers = "; ".join(f"{x.offer}: {x.reason}" for x in d.losers) or "no offers"
        times = "; ".join(
            f"{rows} rows {time_of(t['ours'])}, stock {time_of(t['stock'])}"
            for race in races.get(d.site.signature, {}).values() for rows, t in race["rows"].items()
        )  # fmt: skip
        line = f"{d.site.describe()}: {d.chosen} ({losers}) [{times}]"
        lines[line] = lines.get(line, 0) + 1
    return [f"{count} x {line}" for line, count in sorted(lines.items())]


def host_costs(model: Any) -> dict[str, dict[str, float]]:
    """Microseconds per call at one row, by kind of layer: only made, and evaluated 100 at once, 8 layers in turn."""
    import mlx.core as mx

    from backend_core import Policy, accelerate, restore, walk

    kinds: dict[str, list[Any]] = {}
    for _, module in model.named_modules():
        if walk.linear_kinds().get(walk.stock_class(module)) == "linear":
            kinds.setdefault("x".join(map(str, module.scales.shape)), []).append(module)
    found: dict[str, dict[str, float]] = {}

    def measure(side: str) -> None:
        for kind, modules in kinds.items():
            x = mx.zeros((1, 1, modules[0].scales.shape[1] * GROUP), modules[0].scales.dtype)
            made, whole = [], []
            for _ in range(12):
                begin = time.perf_counter()
                results = [modules[i % min(len(modules), 8)](x) for i in range(100)]
                made.append(time.perf_counter() - begin)
                mx.eval(results)
                whole.append(time.perf_counter() - begin)
            costs = found.setdefault(kind, {})
            costs[f"{side} made"] = round(statistics.median(made) * 1e4, 2)
            costs[f"{side} evaluated"] = round(statistics.median(whole) * 1e4, 2)

    restore(model)
    measure("stock")
    accelerate(model, Policy(deterministic=True))
    measure("ours")
    restore(model)
    return found


def worker(model_path: str, bits: int, tokens: int, out: Path) -> None:
    """Writes JSON after each step, so that what was found before the time is over counts."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load

    from backend_core import Policy, accelerate, restore
    from backend_core.simt import compiled

    found: dict[str, Any] = {"device": {k: str(v) for k, v in mx.device_info().items()}, "mlx": mx.__version__}

    def keep(name: str, value: Any) -> None:
        found[name] = value
        out.write_text(json.dumps(found))

    begin = time.perf_counter()
    model, tokenizer = load(model_path)
    mx.eval(model.parameters())
    keep("load_s", time.perf_counter() - begin)
    seconds: dict[str, float] = {}
    timed(seconds)
    prompt = prompt_tokens(len(tokenizer.vocab))
    report = accelerate(model)
    keep("report", report.line())
    keep("select_s", report.seconds)
    keep("seconds", dict(seconds))
    keep("not compiled here", compiled.why_not() if mx.cuda.is_available() else "no CUDA")
    keep("why", why(report))
    keep("decisions", [d.as_dict() for d in report.decisions])
    accel, _ = greedy(model, prompt, tokens)
    restore(model)
    try:
        stock, _ = greedy(model, prompt, tokens)
    except Exception as error:
        stock = []
        keep("stock_error", f"{type(error).__name__}: {error}"[:300])
    every = Policy(deterministic=True)
    sides = ["stock", "accel", "all offers"] if stock else ["accel", "all offers"]
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(4):
        for side in sides if turn % 2 == 0 else sides[::-1]:
            restore(model)
            if side != "stock":
                chosen = accelerate(model, every if side == "all offers" else None)
                keep(f"{side}: report", chosen.line())
            if turn == 0:
                greedy(model, prompt, 4)
            speeds[side].append(greedy(model, prompt, tokens)[1])
            keep("speeds", speeds)
    restore(model)
    if stock:
        keep("host", host_costs(model))

    # The float32 model, and what everybody says along its text.
    reference, _ = load(model_path)
    reference.set_dtype(mx.float32)
    dense(reference)
    text, _ = greedy(reference, prompt, tokens)
    want = logits_along(reference, prompt, text)
    del reference
    mx.clear_cache()

    def compare(name: str, candidate: Any, own: list[int]) -> None:
        have = logits_along(candidate, prompt, text)
        same = next((i for i, (a, b) in enumerate(zip(own, text, strict=False)) if a != b), len(text))
        keep(f"agreement {name}", {
            "tokens": len(text), "same_tokens_until": same,
            "same_choice": int((have.argmax(-1) == want.argmax(-1)).sum()),
            "logits_off": float(np.abs(have - want).max() / want.std()),
        })  # fmt: skip

    if stock:
        compare("stock, model's dtype", model, stock)
    accelerate(model)
    compare("accelerated, model's dtype", model, accel)
    restore(model)
    accelerate(model, every)
    compare("all offers, model's dtype", model, greedy(model, prompt, tokens)[0])
    restore(model)
    # What stays stock may fail in float32, as stock does.
    wide, _ = load(model_path)
    wide.set_dtype(mx.float32)
    for side in ("stock", "accelerated"):
        if side == "accelerated":
            keep("report float32", accelerate(wide).line())
        try:
            compare(f"{side}, float32", wide, greedy(wide, prompt, tokens)[0])
        except Exception as error:
            keep(f"{side} float32 error", f"{type(error).__name__}: {error}"[:300])


def show(run: Run, found: dict[str, Any]) -> None:
    """What the worker found, as lines."""
    if "report" in found:
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in found.get("seconds", {}).items())
        run.say(f"- loaded in {found['load_s']:.1f} s; accelerate(): {found['report']}")
        run.say(f"  {parts}; kernels compiled here: {found.get('not compiled here') or 'yes'}")
        for line in found.get("why", ()):
            run.say(f"  - {line}")
    if "stock_error" in found:
        run.say(f"- stock cannot run: {found['stock_error']}")
    speeds = {side: values for side, values in found.get("speeds", {}).items() if values}
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    for side, values in speeds.items():
        run.say(f"- {side}: {medians[side]:.1f} tokens/s ({min(values):.1f}..{max(values):.1f})")
    if "stock" in medians:
        for side in medians.keys() - {"stock"}:
            run.say(f"- {side}: {medians[side] / medians['stock']:.2f}x stock; {found.get(f'{side}: report', '')}")
    for kind, costs in found.get("host", {}).items():
        run.say(f"- host, scales {kind}: " + ", ".join(f"{name} {value} us" for name, value in costs.items()))
    run.say("\n| next to float32 | same text until token | same choice | largest logit error / spread of logits |")
    run.say("|---|---|---|---|")
    for name, value in found.items():
        if name.endswith(" float32 error"):
            run.say(f"| {name[:-14]}, float32 | fails: {value} | | |")
        if name.startswith("agreement "):
            run.say(f"| {name[10:]} | {value['same_tokens_until']} of {value['tokens']} | "
                    f"{value['same_choice']} of {value['tokens']} | {value['logits_off']:.2g} |")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="directory of the results")
    parser.add_argument("--bits", default="2", help="of the models, in order")
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    parser.add_argument("--seconds", type=float, default=150, help="time limit")
    parser.add_argument("--native", type=Path, metavar="FILE", help="the native module, built for this Python and mlx")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers")
    parser.add_argument("--any-device", action="store_true", help="also without a GPU")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "BITS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], int(options.worker[1]), options.tokens, options.out)
        return 0
    try:
        import mlx.core as mx
    except ImportError as error:
        print(f"mlx cannot be imported ({error}): put it on PYTHONPATH and CUDA's libraries on LD_LIBRARY_PATH")
        return 2
    gpu = mx.default_device().type != mx.DeviceType.cpu
    if not gpu and not options.any_device:
        print("mlx has no GPU here; --any-device runs nevertheless")
        return 2
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out, options.seconds)
    info = mx.device_info()
    run.say(f"# {info.get('device_name')}, {info.get('architecture')}, mlx {mx.__version__}\n")
    dimensions = TINY if options.tiny else QWEN3
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        environment = install(run, site, gpu, options.native)
        for bits in map(int, options.bits.split(",")):
            model = Path(folder) / f"qwen3-{bits}bit"
            run.say(f"\n## {bits} bits\n")
            begin = time.time()
            write_model(model, bits, dimensions)
            run.say(f"(model made in {time.time() - begin:.0f} s)\n")
            text: dict[str, Any] = {}

            def ask(label: str, *extra: str, model: Path = model, bits: int = bits, text: Any = text) -> None:
                if run.left() > 10:
                    text[label] = generate(run, label, model, dimensions[-1], options.tokens, environment, *extra)
                    run.keep(f"{bits}-bit command", text)

            ask("accel", "--backend", "accel", "--backend-option", "report=full")
            ask("accel-again", "--backend", "accel")
            result = options.out / f"worker-{bits}.json"
            arguments = [sys.executable, __file__, "--worker", str(model), str(bits), "--tokens", str(options.tokens),
                         "--out", str(result)]  # fmt: skip
            if run.left() > 10:
                status, output, seconds = command(run, arguments, environment)
                found = json.loads(result.read_text()) if result.is_file() else {}
                run.keep(f"{bits}-bit in one process", found)
                show(run, found)
                run.say(f"(exit status {status}, {seconds:.0f} s)")
                if status:
                    run.say(output[-2500:])
            ask("stock")
    return 0


if __name__ == "__main__":
    sys.exit(main())
