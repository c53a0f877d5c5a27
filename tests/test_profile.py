"""The profile: remembered races and the quarantine, whatever happens to the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import helpers
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend_core import paths, profile
from backend_core.profile import Profile

FACTS = {"mlx": "0.32.4", "threads": 2}
RACE = {"rows": {"1": {"ours": 1e-5, "stock": 3e-5, "spread": 0.01, "how": "raced"}}}
PREAMBLE = "import json, os, sys, time\nfrom pathlib import Path\nfrom backend_core.profile import Profile\n"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "cache" / "profile.json"


@pytest.fixture
def fresh(file):
    """fresh(facts): the profile as another process would see it now."""
    return lambda facts=FACTS: Profile(facts, file)


def run(code, file):
    return helpers.python("-c", PREAMBLE + code, str(file))


# Races


def test_the_default_place_is_in_the_cache():
    assert Profile(FACTS).path == paths.profile_path()
    assert str(paths.profile_path()).startswith(os.environ["MLX_ACCEL_CACHE"])


def test_a_new_profile_is_empty_and_writes_nothing(fresh, file):
    p = fresh()
    assert p.get("sig", "a/x") is None and p.quarantine_reason("key") == "" and p.notes == []
    p.save()
    assert not file.exists()


def test_races_come_back(fresh, file):
    p = fresh()
    p.put("sig", "a/x", RACE)
    assert p.get("sig", "a/x") == RACE
    assert fresh().get("sig", "a/x") is None  # not before it is saved
    p.save()
    q = fresh()
    assert q.get("sig", "a/x") == RACE
    assert q.get("sig", "a/y") is None and q.get("other", "a/x") is None
    assert q.notes == []
    data = json.loads(file.read_text())
    assert data["format"] == 1
    assert data["environments"][p.key]["facts"] == FACTS


def test_saving_merges_and_the_last_race_of_an_offer_counts(fresh):
    p, q = fresh(), fresh()
    p.put("sig", "a/x", RACE)
    q.put("sig", "a/y", RACE)
    q.put("sig2", "a/x", RACE)
    p.save()
    q.save()
    again = {"rows": {"1": {"ours": 1.0, "stock": 1.0, "spread": 0.0, "how": "raced"}}}
    r = fresh()
    r.put("sig", "a/x", again)
    r.save()
    s = fresh()
    assert s.get("sig", "a/x") == again
    assert s.get("sig", "a/y") == RACE and s.get("sig2", "a/x") == RACE


def test_saving_twice_writes_once(fresh, file):
    p = fresh()
    p.put("sig", "a/x", RACE)
    p.save()
    file.unlink()
    p.save()
    assert not file.exists()


def test_environments_do_not_mix(fresh):
    p = fresh()
    p.put("sig", "a/x", RACE)
    p.save()
    other = fresh({**FACTS, "threads": 4})
    assert other.get("sig", "a/x") is None
    assert other.notes == ["earlier races do not count: threads changed"]
    assert fresh({**FACTS, "activations": "another"}).notes == []  # another kind, not a later one
    other.put("sig", "a/x", {"rows": {}})
    other.save()
    assert fresh().get("sig", "a/x") == RACE
    assert fresh({**FACTS, "threads": 4}).notes == []


def test_the_key_depends_on_content_and_not_on_order():
    keys = [Profile(f).key for f in (FACTS, dict(reversed(FACTS.items())), {**FACTS, "mlx": "0.33"})]
    assert keys[0] == keys[1] != keys[2]


def test_old_environments_are_dropped_the_newest_stay(fresh, file, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(profile.time, "time", lambda: now[0])
    for i in range(profile.MAX_ENVIRONMENTS + 3):
        now[0] += 1
        p = fresh({"i": i})
        p.put("sig", "a/x", RACE)
        p.save()
    kept = sorted(e["facts"]["i"] for e in json.loads(file.read_text())["environments"].values())
    assert kept == list(range(3, profile.MAX_ENVIRONMENTS + 3))
    assert fresh({"i": 18}).get("sig", "a/x") == RACE


@pytest.mark.parametrize("race", [{}, {"rows": []}, {"rows": None}, [], "x", None])
def test_a_race_without_rows_counts_as_none(fresh, file, race):
    p = fresh()
    p.put("sig", "a/x", RACE)
    p.save()
    data = json.loads(file.read_text())
    data["environments"][p.key]["races"]["sig"]["a/x"] = race
    file.write_text(json.dumps(data))
    assert fresh().get("sig", "a/x") is None


# Damaged files

CORRUPT = {
    "empty": "", "cut off": '{"format": 1, "environments": {', "not JSON": "hello", "binary": b"\xff\x00\xfe",
    "deep": "[" * 100_000, "no tables": '{"format": 1}',
    "quarantine missing": '{"format": 1, "environments": {}}',
    "list": '{"format": 1, "environments": [], "quarantine": {}}',
    "environment is a list": '{"format": 1, "environments": {"K": []}, "quarantine": {}}',
    "no races": '{"format": 1, "environments": {"K": {"facts": {}}}, "quarantine": {}}',
    "races is a list": '{"format": 1, "environments": {"K": {"races": []}}, "quarantine": {}}',
    "signature is a list": '{"format": 1, "environments": {"K": {"races": {"sig": []}}}, "quarantine": {}}',
    "when is text": '{"format": 1, "environments": {"K": {"races": {}, "when": "now"}}, "quarantine": {}}',
    "quarantine entry is text": '{"format": 1, "environments": {}, "quarantine": {"k": "bad"}}',
}  # fmt: skip
OTHER_FORMAT = {"newer": '{"format": 2}', "a list": "[]", "a number": "3", "null": "null", "no format": "{}"}


@pytest.mark.parametrize("what", [*CORRUPT, *OTHER_FORMAT])
def test_a_damaged_file_is_ignored_noted_and_replaced(fresh, file, what):
    text = {**CORRUPT, **OTHER_FORMAT}[what]
    file.parent.mkdir(parents=True)
    key = Profile(FACTS, file).key
    file.write_bytes(text if isinstance(text, bytes) else text.replace('"K"', f'"{key}"').encode())
    p = fresh()
    why = "is corrupt and was ignored" if what in CORRUPT else "has another format and was ignored"
    assert p.notes == [f"profile {file} {why}"]
    assert p.get("sig", "a/x") is None and p.quarantine_reason("k") == ""
    p.put("sig", "a/x", RACE)
    p.save()
    q = fresh()
    assert q.get("sig", "a/x") == RACE and q.notes == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    where=st.sampled_from([
        ("environments",), ("quarantine",), ("environments", "K"), ("environments", "K", "races"),
        ("environments", "K", "when"), ("environments", "K", "races", "sig"), ("quarantine", "k"),
        ("environments", "K", "races", "sig", "a/x"), ("environments", "K", "facts"), ("format",),
    ]),
    value=json_values,
)  # fmt: skip
def test_any_json_anywhere_stops_nothing(file, where, value):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    key = Profile(FACTS, file).key
    data: dict = {
        "format": 1,
        "environments": {key: {"facts": FACTS, "races": {"sig": {"a/x": RACE}}, "when": 1.0}},
        "quarantine": {"k": {"offer": "a/x", "reason": "crashed", "when": 1.0}},
    }
    at = data
    for step in where[:-1]:
        at = at[key if step == "K" else step]
    at[key if where[-1] == "K" else where[-1]] = value
    file.write_text(json.dumps(data))
    p = Profile(FACTS, file)
    assert p.get("sig", "a/x") is None or isinstance(p.get("sig", "a/x")["rows"], dict)
    assert isinstance(p.quarantine_reason("k"), str)
    p.put("sig", "a/z", RACE)
    p.quarantine("q", "a/q", "wrong")
    p.save()
    q = Profile(FACTS, file)
    assert q.get("sig", "a/z") == RACE and q.quarantine_reason("q") == "wrong"


def test_a_place_that_cannot_be_written_is_one_note(tmp_path):
    # Root may write everywhere, but not below a file.
    blocker = tmp_path / "blocker"
    blocker.write_text("I am a file")
    p = Profile(FACTS, blocker / "cache" / "profile.json")
    p.put("sig", "a/x", RACE)
    p.save()
    p.quarantine("key", "a/x", "wrong")
    with p.in_flight("key", "a/x"):
        pass
    assert p.get("sig", "a/x") == RACE and p.quarantine_reason("key") == "wrong"
    written = [n for n in p.notes if "cannot be written" in n]
    assert len(written) == 1 and written[0].endswith("races are not remembered")
    assert all("profile.json" in n for n in p.notes)
    assert blocker.read_text() == "I am a file"


def test_a_profile_that_is_a_directory_is_noted(file, fresh):
    file.mkdir(parents=True)
    p = fresh()
    assert p.notes == [f"profile {file} cannot be read (Is a directory); racing without it"]
    p.put("sig", "a/x", RACE)
    p.save()
    assert any("cannot be written" in n for n in p.notes)
    assert list(file.parent.glob(".profile-*")) == []


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(fresh, file, monkeypatch):
    p = fresh()
    p.put("sig", "a/x", RACE)
    p.save()
    before = file.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    p.put("sig", "a/y", RACE)
    monkeypatch.setattr(profile.json, "dump", full)
    p.save()
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert p.notes == [f"profile {file} cannot be written (No space left on device); races are not remembered"]
    assert list(file.parent.glob(".profile-*")) == []
    p.save()  # what was not written is kept for the next attempt
    assert Profile(FACTS, file).get("sig", "a/y") == RACE


@pytest.mark.parametrize("error", [NotImplementedError("no flock"), PermissionError(13, "Permission denied")])
def test_a_file_system_without_locks_is_noted(fresh, monkeypatch, error):
    import filelock

    def acquire(*args, **kwargs):
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    p = fresh()
    p.put("sig", "a/x", RACE)
    p.save()
    assert [n for n in p.notes if "cannot be written" in n] == p.notes != []


def test_a_held_lock_is_waited_for(fresh, file):
    import filelock

    p = fresh()
    p.put("sig", "a/x", RACE)
    file.parent.mkdir(parents=True)
    lock = filelock.FileLock(str(file) + ".lock")
    lock.acquire()
    writer = threading.Thread(target=p.save)
    writer.start()
    time.sleep(0.2)
    assert not file.exists()
    lock.release()
    writer.join(10)
    assert fresh().get("sig", "a/x") == RACE


# Several processes


def test_a_reader_keeps_the_whole_file_it_opened(fresh, file):
    p = fresh()
    p.put("sig", "a/x", RACE)
    p.save()
    before = file.read_text()
    with file.open() as reader:
        p.put("sig", "a/y", RACE)
        p.save()
        assert reader.read() == before
    assert file.read_text() != before


def test_two_processes_lose_nothing_and_readers_never_see_half_a_file(fresh, file):
    code = PREAMBLE + (
        "for i in range(15):\n"
        "    p = Profile({'mlx': '0.32.4', 'threads': 2}, Path(sys.argv[1]))\n"
        "    p.put(f'sig{i}', sys.argv[2], {'rows': {'1': {'ours': 1, 'pad': 'x' * 20000}}})\n"
        "    p.save()\n"
        "    assert not p.notes, p.notes\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(file), who], stderr=subprocess.PIPE, text=True)
        for who in ("a/x", "b/y")
    ]
    reads = 0
    while any(w.poll() is None for w in writers):
        if file.exists():
            data = json.loads(file.read_text())  # raises on half a file
            assert data["format"] == 1
            reads += 1
    assert [w.wait() for w in writers] == [0, 0], [w.stderr.read() for w in writers]
    for w in writers:
        w.stderr.close()
    assert reads > 10
    p = fresh()
    missing = [(i, who) for i in range(15) for who in ("a/x", "b/y") if p.get(f"sig{i}", who) is None]
    assert missing == []
    assert list(file.parent.glob(".profile-*")) == []


# Quarantine and markers


def markers(file):
    return sorted((file.parent / "inflight").glob("*.json"))


def test_quarantine_is_remembered_across_environments(fresh):
    fresh().quarantine("key", "a/x", "wrong numbers")
    assert fresh().quarantine_reason("key") == "wrong numbers"
    assert fresh({"other": 1}).quarantine_reason("key") == "wrong numbers"
    assert fresh().quarantine_reason("other") == ""


def test_a_marker_stands_while_the_code_runs_and_names_the_writer(fresh, file):
    with fresh().in_flight("key", "a/x"):
        [marker] = markers(file)
        data = json.loads(marker.read_text())
        assert (data["offer"], data["offer_key"], data["pid"]) == ("a/x", "key", os.getpid())
        # The writer lives, so neither it nor another process draws a conclusion.
        assert fresh().quarantine_reason("key") == ""
        out = run("p = Profile({}, Path(sys.argv[1])); print(repr(p.quarantine_reason('key')), p.notes)", file)
        assert out.stdout.strip() == "'' []"
        assert markers(file) == [marker]
    assert markers(file) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_exceptions_and_interrupts_remove_the_marker(fresh, file, error):
    with pytest.raises(error), fresh().in_flight("key", "a/x"):
        assert len(markers(file)) == 1
        raise error
    assert markers(file) == []
    assert fresh().quarantine_reason("key") == ""


def die(file, end, key="key"):
    out = run(f"p = Profile({{}}, Path(sys.argv[1]))\nwith p.in_flight('{key}', 'a/{key}'): {end}", file)
    assert out.returncode != 0
    assert len(markers(file)) == 1


REASON = "the process died while this offer ran for the first time"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 11)", "os.abort()", "os.kill(os.getpid(), 8)"])
def test_a_crash_is_quarantined_by_the_next_process_for_good(fresh, file, end):
    die(file, end)
    p = fresh()
    assert p.quarantine_reason("key") == REASON
    assert p.notes == ["a/key is quarantined: an earlier process died while it ran"]
    assert markers(file) == [] and list((file.parent / "inflight").iterdir()) == []
    # Known from the file now, without another note.
    q = fresh({"other": 1})
    assert q.quarantine_reason("key") != "" and q.notes == []


@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 15)"])
def test_a_process_that_was_ended_gives_a_second_chance(fresh, file, end):
    die(file, end)
    p = fresh()
    assert p.quarantine_reason("key") == ""
    assert p.notes == ["an earlier process ended while a/key was tried; it is tried once more"]
    assert fresh().notes == []
    die(file, end)
    assert fresh().quarantine_reason("key") == REASON


def test_the_crash_handler_of_the_program_is_given_back(fresh):
    import faulthandler

    watched = faulthandler.is_enabled()
    with fresh().in_flight("key", "a/x"):
        assert faulthandler.is_enabled()
    assert faulthandler.is_enabled() is watched


def test_a_second_crash_of_another_offer_adds_to_the_first(fresh, file):
    for key in ("one", "two"):
        run(f"p = Profile({{}}, Path(sys.argv[1]))\nwith p.in_flight('{key}', 'a/{key}'): os.abort()", file)
    p = fresh()
    assert p.quarantine_reason("one") and p.quarantine_reason("two")
    assert len(p.notes) == 1  # the first one was noted by the second process


def test_a_zombie_counts_as_dead(fresh, file):
    code = PREAMBLE + (
        "if os.fork() == 0:\n"
        "    p = Profile({}, Path(sys.argv[1]))\n"
        "    with p.in_flight('key', 'a/x'): os.abort()\n"
        "print('x', flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True)
    try:
        parent.stdout.readline()
        for _ in range(200):
            if markers(file) and fresh().quarantine_reason("key"):
                break
            time.sleep(0.02)
        assert fresh().quarantine_reason("key") != ""
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def write_marker(file, **changes):
    folder = file.parent / "inflight"
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.getpid()
    facts = {"offer": "a/x", "offer_key": "key", "pid": pid, "boot": profile._boot_id(),
             "start": profile._start_time(pid), "when": 1.0, **changes}  # fmt: skip
    path = folder / "key.json"
    path.write_text(json.dumps({k: v for k, v in facts.items() if v != "absent"}))
    return path


@pytest.mark.parametrize(
    "changes,dead",
    [({}, False), ({"start": "1"}, True), ({"boot": "another"}, True), ({"start": None}, True),
     ({"pid": 2**22 + 1}, True), ({"pid": 2**70}, True), ({"pid": -5}, True)],
)  # fmt: skip
def test_a_reused_pid_or_another_boot_means_dead(fresh, file, changes, dead):
    path = write_marker(file, **changes)
    path.with_suffix(".crash").write_text("Fatal Python error: Segmentation fault")
    assert bool(fresh().quarantine_reason("key")) is dead
    assert path.exists() is not dead


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"pid": "x"}', '{"pid": 1}', b"\xff"])
def test_half_a_marker_is_left_alone_at_first_and_swept_later(fresh, file, text):
    path = write_marker(file)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    p = fresh()
    assert p.notes == [] and path.exists() and p.quarantined == {}
    os.utime(path, (time.time() - 120,) * 2)
    assert fresh().quarantined == {}
    assert not path.exists()


def test_a_marker_stays_until_its_quarantine_is_saved(fresh, file, monkeypatch):
    path = write_marker(file, start="1")
    path.with_suffix(".crash").write_text("Fatal Python error: Segmentation fault")
    monkeypatch.setattr(Profile, "_update", lambda self, change: False)
    p = fresh()
    assert p.quarantine_reason("key") != ""
    assert path.exists()
    monkeypatch.undo()
    fresh()
    assert not path.exists()
    assert fresh().quarantine_reason("key") != ""


def test_clearing_lifts_everything(fresh, file):
    p = fresh()
    p.put("sig", "a/x", RACE)
    p.save()
    p.quarantine("key", "a/x", "wrong")
    file.unlink()
    q = fresh()
    assert q.get("sig", "a/x") is None and q.quarantine_reason("key") == ""
