"""The trained ternary model of examples/tiny-ternary: the same text and the same perplexity in every form."""

import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import generate
from t5_ternary import repack

from backend_core import Policy, load

MODEL = Path(__file__).resolve().parents[3] / "examples/tiny-ternary/model"
TEXT = """BRUTUS.
There is a tide in the affairs of men
Which, taken at the flood, leads on to fortune;
Omitted, all the voyage of their life
Is bound in shallows and in miseries.
On such a full sea are we now afloat,
And we must take the current when it serves,
Or lose our ventures.
"""

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason=f"no {MODEL}: not run from the repository")


@pytest.fixture(scope="module")
def affine(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("ternary") / "affine"
    repack.write(repack.plan(MODEL, to="affine"), target)
    return target


def policy(t5: str | None = None) -> Policy:
    options = (("t5", t5),) if t5 else ()
    return Policy(deterministic=True, report="none", activations="float32", plugin_options=options)


def results(path: Path, t5: str | None = None) -> tuple[float, str]:
    """Perplexity per byte of TEXT, and 24 greedy tokens after its first line."""
    model, tokenizer = load(path, policy(t5))
    tokens = mx.array(list(TEXT.encode()))
    logits = model(tokens[None, :-1])[0].astype(mx.float32)
    loss = nn.losses.cross_entropy(logits, tokens[1:], reduction="mean").item()
    return math.exp(loss), generate(model, tokenizer, prompt="BRUTUS.\n", max_tokens=24)


@pytest.fixture(scope="module")
def of_affine(affine) -> tuple[float, str]:
    return results(affine)


def test_packed_expanded_and_affine_agree(of_affine):
    perplexity, text = of_affine
    for t5 in ("packed", "expand"):
        mine, mine_text = results(MODEL, t5)
        assert mine == pytest.approx(perplexity, rel=1e-6)
        assert mine_text == text


def test_the_model_knows_its_language(of_affine):
    """Far better than chance (257), and words come out."""
    perplexity, text = of_affine
    assert perplexity < 4
    assert len(text) >= 20 and text.count(" ") >= 2
