"""Reports: decisions as data, and one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_core import Decision, LinearSite, OpSite, Report
from backend_core.report import STOCK, Bucket, Loser

SMALL, LARGE = (1, 16), (17, None)


def decision(path, small=STOCK, large=STOCK, ratio=1.0, losers=(), **site):
    return Decision(
        LinearSite(path, **site),
        (Bucket(SMALL, small, ratio, 0.0312345, "raced"), Bucket(LARGE, large, 2.0, 0.0, "extrapolated")),
        tuple(losers),
    )


def test_decision_is_what_runs_at_one_row():
    d = decision("a", "p/x", STOCK, 3.25)
    assert (d.chosen, d.ratio, d.accelerated) == ("p/x", 3.25, True)
    assert decision("a").accelerated is False
    assert decision("a", STOCK, "p/x").accelerated is True
    assert decision("a", STOCK, "p/x").chosen == STOCK


def test_decision_as_data():
    d = decision("m.q", "p/x", "p/y", 3.14159, [Loser("p/z", "slower"), Loser("t5", "made no offer")], n=8, k=32)
    facts = json.loads(json.dumps(d.as_dict()))
    assert facts["path"] == "m.q" and facts["hook"] == "select_linear"
    assert facts["signature"] == d.site.signature
    assert facts["site"]["n"] == 8 and facts["site"]["k"] == 32
    assert (facts["chosen"], facts["ratio"], facts["spread"]) == ("p/x", 3.142, 0.031)
    assert facts["buckets"] == [
        {"rows": [1, 16], "chosen": "p/x", "ratio": 3.142, "spread": 0.031, "how": "raced"},
        {"rows": [17, None], "chosen": "p/y", "ratio": 2.0, "spread": 0.0, "how": "extrapolated"},
    ]
    assert facts["losers"] == [
        {"offer": "p/z", "reason": "slower"},
        {"offer": "t5", "reason": "made no offer"},
    ]


def test_data_taken_from_a_report_is_a_copy():
    loser = Loser("p/z", "slower")
    report = Report([decision("a", losers=[loser])], notes=["n"])
    facts = report.as_dict()
    facts["decisions"][0]["losers"][0]["reason"] = "changed"
    facts["notes"].append("changed")
    assert loser.reason == "slower" and report.notes == ["n"]


def test_what_callables_say_while_they_run_is_in_the_report_when_it_is_printed():
    notes: list[str] = []
    details = {"p/x": {"exactness": "rounding", "note": "fast", "notes": notes}}
    report = Report([replace(decision(path, "p/x"), details=details) for path in "ab"], notes=["n"])
    assert report.sentences() == ["n"] and report.as_dict()["decisions"][0]["offers"]["p/x"]["notes"] == []
    notes.append("not as it should be: why\nand where")
    sentence = "p/x: not as it should be: why"
    assert report.as_dict()["notes"] == ["n", f"{sentence}\nand where"] and report.notes == ["n"]
    facts = report.as_dict()["decisions"][1]["offers"]["p/x"]
    assert facts["notes"] == notes and facts["notes"] is not notes
    assert f"n; {sentence} (" in report.line()


def test_report_as_json():
    report = Report(
        [decision("a", "p/x"), decision("b", "p/x"), decision("c")],
        notes=["n"], plugins=[{"name": "p"}], policy={"race": "on"}, activations="float32", seconds=1.23456,
    )  # fmt: skip
    facts = json.loads(report.to_json())
    assert [d["path"] for d in facts["decisions"]] == ["a", "b", "c"]
    assert facts["counts"] == {"p/x": 2, "stock": 1}
    assert facts["notes"] == ["n"] and facts["plugins"] == [{"name": "p"}]
    assert facts["policy"] == {"race": "on"} and facts["activations"] == "float32"
    assert facts["seconds"] == 1.235


def test_decisions_are_found_by_path_alias_and_hook():
    linear, op = decision("a", aliases=("b", "c")), Decision(OpSite("a"), (Bucket((1, None), STOCK),))
    report = Report([linear, op])
    assert report.decision("a") is report.decision("b") is report.decision("c") is linear
    assert report.decision("a", "select_op") is op
    for path, hook in (("z", "select_linear"), ("b", "select_op"), ("a", "fuse_moe")):
        with pytest.raises(KeyError, match=f"no {hook} site '{path}'"):
            report.decision(path, hook)


def test_a_note_is_kept_once_and_in_order():
    report = Report()
    for text in ("b", "a", "b"):
        report.note(text)
    assert report.notes == ["b", "a"]


@pytest.mark.parametrize(
    "decisions,notes,want",
    [
        ([], [], "[accel] 0 sites: none accelerated, 0 stay stock (0.50 s)"),
        ([decision("a")], [], "[accel] 1 sites: none accelerated, 1 stay stock (0.50 s)"),
        ([decision("a", "p/x"), decision("b"), decision("c", "p/y"), decision("d", "p/x")], ["one", "two"],
         "[accel] 4 sites: 2 run p/x, 1 run p/y, 1 stay stock; one; two (0.50 s)"),
    ],
)  # fmt: skip
def test_line(decisions, notes, want):
    report = Report(decisions, notes=notes, seconds=0.5)
    assert report.line() == want
    assert report.line() == want  # printing changes nothing
    assert report.notes == notes


@given(st.lists(st.sampled_from([STOCK, "p/x", "p/y", "q/x"]), max_size=20))
def test_counts_add_up(chosen):
    report = Report([decision(str(i), c) for i, c in enumerate(chosen)])
    assert sum(report.counts().values()) == len(chosen)
    assert all(report.counts()[c] == chosen.count(c) for c in chosen)
    assert report.line().startswith(f"[accel] {len(chosen)} sites: ")
    assert f"{chosen.count(STOCK)} stay stock" in report.line()
    assert "\n" not in report.line()


def test_reports_do_not_share_lists():
    a, b = Report(), Report()
    a.note("x")
    a.decisions.append(decision("a"))
    assert b.notes == [] and b.decisions == []
