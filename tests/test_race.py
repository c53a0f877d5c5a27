"""Races: what is timed, how often, and what is concluded."""

from __future__ import annotations

import contextlib
import random

import pytest

from backend_core import race
from backend_core.race import Timing


@pytest.mark.parametrize(
    ("ratio", "spread", "wins", "not_slower"),
    [
        (1.0, 0.0, False, True),
        (1.01, 0.0, False, True),  # within 2 %
        (1.03, 0.0, True, True),
        (1.2, 0.3, False, True),  # within the noise
        (1.4, 0.3, True, True),
        (0.99, 0.0, False, True),
        (0.9, 0.05, False, False),
        (0.9, 0.2, False, True),
        (5.0, 9.0, True, True),  # a clear lead, however noisy
        (0.01, 9.0, False, True),
    ],
)
def test_a_win_exceeds_the_noise(ratio, spread, wins, not_slower) -> None:
    t = Timing(1.0, ratio, spread)
    assert t.ratio == pytest.approx(ratio)
    assert (t.wins, t.not_slower) == (wins, not_slower)


@pytest.mark.parametrize(
    ("ratio", "spread", "unclear"),
    [
        (1.05, 0.05, False),  # open, but close
        (1.2, 0.3, True),  # open, and may be a win
        (0.9, 0.3, True),  # open, and may be a loss
        (1.4, 0.3, False),  # a win
        (0.5, 0.3, False),  # a loss
        (1.7, 0.6, True),  # a win on a day like that
        (5.0, 9.0, False),
        (0.2, 9.0, False),
    ],
)
def test_what_the_noise_left_open_is_not_remembered(ratio, spread, unclear) -> None:
    assert Timing(1.0, ratio, spread).unclear == unclear


class FakeProbe:
    """Stock takes `per_row` seconds a row, ours `ours`."""

    sliceable = False

    def __init__(self, proportional: bool) -> None:
        self.proportional = proportional
        self.site = None
        self.calls: list[tuple[str, int]] = []

    def args(self, rows: int) -> tuple[int]:
        return (rows,)

    def stock(self, module, rows):
        self.calls.append(("stock", rows))
        return ("stock", rows)


def run(monkeypatch, probe: FakeProbe, seconds, device: str = "cpu", rows=race.RACE_ROWS) -> dict[int, Timing]:
    """A race in which a call takes seconds(kind, rows)."""

    def batch_time(call, modules, calls):
        results = [call(modules[i % len(modules)]) for i in range(calls)]
        return sum(seconds(*r) for r in results) / calls

    monkeypatch.setattr(race, "_batch_time", batch_time)

    def ours(module, rows):
        probe.calls.append(("ours", rows))
        return ("ours", rows)

    return race.race(probe, ["m1", "m2"], ours, rows, device)


def test_stock_is_never_run_at_more_than_four_rows_on_the_cpu(monkeypatch) -> None:
    probe = FakeProbe(proportional=True)
    result = run(monkeypatch, probe, lambda kind, rows: 1e-3 * rows * (4 if kind == "stock" else 1))
    assert max(rows for kind, rows in probe.calls if kind == "stock") == race.STOCK_MAX_ROWS == 4
    assert [result[m].how for m in (1, 4, 16, 64)] == ["raced", "raced", "extrapolated", "extrapolated"]
    assert result[64].stock == pytest.approx(0.256) and result[64].ratio == pytest.approx(4)


def test_stock_is_run_at_all_rows_where_its_time_is_not_proportional(monkeypatch) -> None:
    for proportional, device in ((False, "cpu"), (True, "metal")):
        probe = FakeProbe(proportional)
        result = run(monkeypatch, probe, lambda kind, rows: 1e-3 * (2 if kind == "stock" else 1), device)
        assert {rows for kind, rows in probe.calls if kind == "stock"} == {1, 4, 16, 64}
        assert all(t.how == "raced" for t in result.values())


def test_a_clear_lead_needs_one_repetition_and_a_clear_loss_none(monkeypatch) -> None:
    lead = FakeProbe(True)
    run(monkeypatch, lead, lambda kind, rows: 1e-3 * (10 if kind == "stock" else 1), rows=(1,))
    loss = FakeProbe(True)
    run(monkeypatch, loss, lambda kind, rows: 1e-3 * (1 if kind == "stock" else 10), rows=(1,))
    even = FakeProbe(True)
    run(monkeypatch, even, lambda kind, rows: 1e-3, rows=(1,))
    count = [sum(1 for kind, _ in p.calls if kind == "stock") for p in (lead, loss, even)]
    assert count[0] < count[2] and count[1] < count[2]


def test_a_slow_offer_costs_little(monkeypatch) -> None:
    probe, spent = FakeProbe(True), []

    def seconds(kind, rows):
        t = 0.5 if kind == "ours" else 1e-3
        spent.append(t)
        return t

    run(monkeypatch, probe, seconds, rows=(1,))
    assert sum(spent) < 2.0


@pytest.mark.parametrize(("ours", "wins"), [([5e-3, 4e-4], True), ([5e-3], False)])
def test_a_clear_loss_takes_two_samples(monkeypatch, ours, wins) -> None:
    """The first of the duel is three times as long as stock's, since somebody else had the processor."""
    seen = []

    def seconds(kind, rows):
        if kind == "stock":
            return 1e-3
        seen.append(kind)
        # Two calls to begin with, then the duel's.
        first = len(seen) <= 2 + race._MIN_CALLS
        return ours[0] if first or len(ours) == 1 else ours[1]

    result = run(monkeypatch, FakeProbe(True), seconds, rows=(1,))
    assert result[1].wins == wins
    assert wins or result[1].ratio == pytest.approx(0.2)


class BusyMachine:
    """A clock whose processor is somebody else's half of the time, for some milliseconds each time."""

    def __init__(self, seed: int) -> None:
        self.random, self.now, self.free = random.Random(seed), 0.0, 0.0

    def work(self, seconds: float) -> None:
        while seconds > self.free:
            self.now += self.free + self.random.expovariate(1 / 5e-3)
            seconds -= self.free
            self.free = self.random.expovariate(1 / 5e-3)
        self.now += seconds
        self.free -= seconds


@pytest.mark.parametrize(("ours", "least", "most"), [(4e-4, 19, 20), (6e-4, 0, 1), (9e-4, 0, 0)])
def test_a_busy_machine_hides_a_clear_difference_no_longer_than_short_samples_take(
    monkeypatch, ours, least, most
) -> None:
    """Stock takes 6e-4 seconds. Of twenty races so many are won."""
    won = 0
    for seed in range(20):
        machine = BusyMachine(seed)

        def batch_time(call, modules, calls, machine=machine):
            begin = machine.now
            for i in range(calls):
                machine.work(ours if call(modules[i % len(modules)])[0] == "ours" else 6e-4)
            return (machine.now - begin) / calls

        monkeypatch.setattr(race, "_batch_time", batch_time)
        result = race.race(FakeProbe(True), ["m1", "m2"], lambda module, rows: ("ours", rows), (1,))
        won += result[1].wins
    assert least <= won <= most


def test_what_is_slower_at_rows_1_is_not_tried_at_the_others_of_its_unit(monkeypatch) -> None:
    probe = FakeProbe(True)
    result = run(monkeypatch, probe, lambda kind, rows: 1e-3 * (0.8 if kind == "stock" else 1), "cuda")
    assert {rows for _, rows in probe.calls} == {1, 64}
    assert result[1] is result[4] is result[16] and not result[1].not_slower
    even = FakeProbe(True)
    run(monkeypatch, even, lambda kind, rows: 1e-3, "cuda")
    assert {rows for _, rows in even.calls} == {1, 4, 16, 64}


def test_the_first_run_at_each_number_of_rows_is_watched(monkeypatch) -> None:
    probe, first = FakeProbe(True), []

    @contextlib.contextmanager
    def watch():
        before = len(probe.calls)
        yield
        first.append(probe.calls[before:])

    monkeypatch.setattr(race, "_batch_time", lambda call, modules, calls: (call(modules[0]), 1e-3)[1])
    race.race(probe, ["m"], lambda module, rows: probe.calls.append(("ours", rows)), (1, 4), "cuda", watch=watch)
    assert first == [[("ours", 1)], [("ours", 4)]] and probe.calls.index(("stock", 1)) > 0


def test_layers_take_turns(monkeypatch) -> None:
    seen = []

    def batch_time(call, modules, calls):
        for i in range(calls):
            seen.append(modules[i % len(modules)])
            call(modules[i % len(modules)])
        return 1e-3

    monkeypatch.setattr(race, "_batch_time", batch_time)
    race.race(FakeProbe(True), ["m1", "m2", "m3"], lambda module, rows: None, (1,), "cpu")
    assert seen.count("m2") >= race._MIN_CALLS // 3


class WideProbe(FakeProbe):
    """One that may be timed on a slice on the CPU."""

    sliceable = True

    def __init__(self) -> None:
        super().__init__(True)
        self.site = type("Site", (), {"n": 4096})()


def test_on_a_gpu_stock_is_timed_on_the_whole_layer_after_its_first_call(monkeypatch) -> None:
    probe = WideProbe()

    def seconds(kind, rows):
        # The first call compiles.
        return 9.0 if kind == "stock" and probe.calls.count(("stock", rows)) == 1 else 2e-5

    result = run(monkeypatch, probe, seconds, "cuda")
    assert all(t.how == "raced" and t.ratio == pytest.approx(1.0, rel=0.1) for t in result.values())


def test_an_offer_without_a_rival_wins_and_says_so(monkeypatch) -> None:
    class NoStock(FakeProbe):
        def stock(self, module, rows):
            raise ValueError("1 is not supported\nmore")

    for device in ("cpu", "cuda"):
        result = run(monkeypatch, NoStock(True), lambda kind, rows: 1e-5, device)
        assert [t.how for t in result.values()] == ["stock fails (ValueError: 1 is not supported)"] * 4
        assert all(t.unrivalled and t.wins and t.not_slower and t.sane for t in result.values())
        # As the profile keeps it.
        assert Timing(**result[1].as_dict()) == result[1]


def test_ours_that_fails_is_no_victory(monkeypatch) -> None:
    monkeypatch.setattr(race, "_batch_time", lambda call, modules, calls: call(modules[0]))

    def ours(module, rows):
        raise RuntimeError("does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        race.race(FakeProbe(True), ["m"], ours, (1,), "cuda")
