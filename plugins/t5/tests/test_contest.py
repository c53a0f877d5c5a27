"""The contest behind t5=auto on simulated machines: what is faster by enough is found, whatever else runs."""

import json
import math

import numpy as np
import pytest
from t5_ternary import contest, remembered

WEIGHTS = {1: 0.75, 64: 0.25}


class Machine:
    """Two sides with given times, a clock, and neighbours: for stretches of time everything takes longer, single
    samples much longer, and all of them a bit more or less."""

    def __init__(self, seed: int, first: float, second: float, noise: float = 0.04, bursts: bool = True):
        self.rng = np.random.default_rng(seed)
        self.now, self.samples, self.noise = 0.0, 0, noise
        self.cost = {0: first, 1: second}
        self.bursts = [(t, t + self.rng.exponential(0.3), self.rng.uniform(1.3, 3)) for t in
                       np.cumsum(self.rng.exponential(0.8, 60))] if bursts else []  # fmt: skip

    def side(self, which: int):
        def sample(rows: int) -> float:
            return contest.timed(lambda: self.work(self.cost[which] * rows), lambda: self.now)

        return sample

    def work(self, seconds: float) -> None:
        slow = max((f for begin, end, f in self.bursts if begin <= self.now < end), default=1.0)
        if self.rng.random() < 0.002:
            slow *= 20
        self.samples += 1
        self.now += seconds * slow * math.exp(self.rng.normal(0, self.noise))

    def run(self, line: float = 1.05) -> contest.Contest:
        return contest.contest(self.side(0), self.side(1), WEIGHTS, line)


@pytest.mark.parametrize("lead", [0.7, 0.95, 1.15, 2.0])
def test_the_same_decision_on_a_busy_machine(lead):
    found = [Machine(seed, 3e-4 * lead, 3e-4).run() for seed in range(100)]
    assert all((f.lead > 1.05) == (lead > 1.05) for f in found)


def test_the_times_are_medians_and_the_lead_is_weighted():
    machine = Machine(0, 2e-3, 1e-3, noise=0, bursts=False)
    found = machine.run()
    assert found.lead == pytest.approx(2, rel=0.02)
    assert found.times[1] == pytest.approx((2e-3, 1e-3), rel=0.02)
    assert found.times[64] == pytest.approx((0.128, 0.064), rel=0.02)
    times = {(0, 1): 3.0, (1, 1): 1.0, (0, 64): 1.0, (1, 64): 2.0}
    sides = [lambda rows, s=s: times[s, rows] for s in (0, 1)]
    assert contest.contest(*sides, WEIGHTS, 1.05).lead == pytest.approx(3**0.75 * 0.5**0.25)


def test_it_measures_longer_where_it_is_close():
    clear, close = (Machine(1, 3e-4 * lead, 3e-4).run() for lead in (2.0, 1.05))
    assert clear.pairs == contest.FEWEST
    assert contest.FEWEST < close.pairs <= contest.MOST


def test_sides_take_turns():
    order = []
    contest.contest(lambda m: order.append("a") or 2.0, lambda m: order.append("b") or 1.0, {1: 1.0}, 1.05)
    assert "".join(order) == "abba" * (contest.FEWEST // 2)


def test_a_sample_fills_its_time():
    machine = Machine(0, 0, 0, noise=0, bursts=False)
    machine.rng = np.random.default_rng(5)
    assert contest.timed(lambda: machine.work(0.003), lambda: machine.now) == pytest.approx(0.003)
    assert machine.samples == math.ceil(contest.SECONDS / 0.003)


def test_what_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_ACCEL_CACHE", str(tmp_path / "new"))
    assert remembered.recall("a") is None
    remembered.keep("a", {"expand": True, "what": "x"})
    assert remembered.recall("a") == {"expand": True, "what": "x"}
    for i in range(remembered.MOST + 3):
        remembered.keep(f"k{i}", {"expand": False, "what": ""})
    assert remembered.recall("a") is None and len(json.loads(remembered.path().read_text())) == remembered.MOST
    for text in ("", "[1]", '{"a": 3}', '{"a": {"expand": 1, "what": ""}}', "[" * 100000):
        remembered.path().write_text(text)
        assert remembered.recall("a") is None
        remembered.keep("a", {"expand": True, "what": "y"})
        assert remembered.recall("a")["what"] == "y"
    assert [f.name for f in remembered.path().parent.iterdir()] == ["t5-auto.json"]
    # A place where nothing can be written.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_ACCEL_CACHE", str(tmp_path / "file"))
    remembered.keep("a", {"expand": True, "what": ""})
    assert remembered.recall("a") is None
