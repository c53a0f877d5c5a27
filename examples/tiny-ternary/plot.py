"""Draw the loss curve that train.py --curve wrote: python plot.py loss.json loss.png"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(source: str, target: str) -> None:
    curve = json.loads(Path(source).read_text())["curve"]
    steps = [point["step"] for point in curve]
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(steps, [point["train"] for point in curve], label="trained on (with dropout)")
    axes.plot(steps, [point["held_out"] for point in curve], label="held-out play")
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(0.9, 2.1), title="Ternary weights, 12.7 M parameters")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:3])
