"""The thread pool that kernels share, through self-tests of the native module that involve no mlx."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("mlx.core")

from backend_core import native

pytestmark = pytest.mark.skipif(not native.available(), reason=native.status().reason or "native")


@pytest.fixture
def pool():
    module = native.get()
    before = module.threads()
    yield module
    module.set_threads(before)


def expected_sum(n):
    return sum(i * i for i in range(n)) % 2**64


def check(pool, n, grain, nested=False):
    total, pieces, threads = pool._selftest_parallel(n, grain, nested)
    grain = max(grain, 1)
    assert total == expected_sum(n)
    assert sorted(pieces) == [(b, min(b + grain, n)) for b in range(0, n, grain)]
    assert threads <= pool.threads()
    return threads


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize(("n", "grain"), [(0, 1), (1, 1), (1, 5), (5, 1), (100, 7), (1001, 10), (1000, 1000), (9, 0)])
def test_pieces(pool, threads, n, grain):
    pool.set_threads(threads)
    assert pool.threads() == threads
    for _ in range(20):
        check(pool, n, grain)
        check(pool, n, grain, nested=True)


def test_negative_range_is_empty(pool):
    assert pool._selftest_parallel(-3, 1)[:2] == (0, [])


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_loops_that_run_together(pool, threads, ends):
    pool.set_threads(threads)
    for i in range(300):
        # None, one, and more loops than have a place; some empty, some of one piece, which their caller runs.
        lengths = [(7 * i + 13 * j) % 60 for j in range(i % 12)]
        sums, took_part = pool._selftest_together(lengths, 1 + i % 8, ends)
        assert sums == [expected_sum(n) for n in lengths]
        assert took_part <= threads
        check(pool, 100, 7)  # nothing is left open


def test_a_loop_that_is_begun_wakes_workers(pool):
    pool.set_threads(3)
    time.sleep(0.005)
    assert pool._selftest_together([100_000_000, 100_000_000], 1_000_000, False)[1] > 1


def test_many_short_loops(pool):
    for threads in (2, 4):
        pool.set_threads(threads)
        for i in range(3000):
            n = i % 37
            assert pool._selftest_parallel(n, 1 + i % 3)[0] == expected_sum(n)


def test_after_sleep(pool):
    pool.set_threads(3)
    for _ in range(10):
        time.sleep(0.005)  # the workers are asleep by now
        check(pool, 500, 3)


def test_sleeping_workers_are_woken(pool):
    # Loops long enough that a woken worker gets a processor, however busy the machine is: one that is not
    # woken would never take part.
    for threads in (2, 4):
        pool.set_threads(threads)
        for _ in range(3):
            time.sleep(0.005)
            assert pool._selftest_parallel(200_000_000, 1_000_000)[2] > 1


def test_busy_from_several_threads(pool):
    pool.set_threads(3)
    errors = []

    def work(seed):
        try:
            for i in range(300):
                n = (seed * 31 + i * 7) % 200
                assert pool._selftest_parallel(n, 3, i % 2 == 0)[0] == expected_sum(n)
                sums, _ = pool._selftest_together([n, 2 * n, 5], 3, i % 3 == 0)
                assert sums == [expected_sum(n), expected_sum(2 * n), expected_sum(5)]
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for i in range(30):  # the size may change under way
        pool.set_threads(1 + i % 4)
    for t in threads:
        t.join(120)
        assert not t.is_alive()
    assert not errors, errors[0]


def test_fork(pool):
    pool.set_threads(3)
    check(pool, 1000, 3)
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            pool._selftest_parallel(5000, 1)

    thread = threading.Thread(target=busy)  # the fork may happen in the middle of a loop
    thread.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                try:
                    ok = all(pool._selftest_parallel(1000, 3)[0] == expected_sum(1000) for _ in range(20))
                    ok = ok and pool.take_errors() == []
                    pool.set_threads(2)
                    ok = ok and pool._selftest_parallel(100, 3)[0] == expected_sum(100)
                finally:
                    os._exit(0 if ok else 1)
            deadline = time.monotonic() + 60
            while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    pytest.fail("the child hangs")
                time.sleep(0.002)
            assert done[1] == 0
    finally:
        stop.set()
        thread.join()
    check(pool, 1000, 3)


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from backend_core import native\nm = native.get()\n" + code],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_exit_right_after_a_loop():
    code = "m.set_threads(4)\n[m._selftest_parallel(10000, 1) for _ in range(100)]\nprint('bye')"
    for _ in range(5):
        assert run(code) == "bye"


def test_environment():
    assert run("print(m.threads())", MLX_ACCEL_THREADS="5") == "5"
    default = run("print(m.threads())", MLX_ACCEL_THREADS="")
    for nonsense in ("0", "-3", "many"):
        assert run("print(m.threads())", MLX_ACCEL_THREADS=nonsense) == default
    assert run("m.set_threads(9); m.set_threads(0); print(m.threads())", MLX_ACCEL_THREADS="") == default


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_affinity():
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(m._default_threads())"
    assert run(code, MLX_ACCEL_THREADS="") == "1"


QUOTAS = {
    "none": ({"proc/self/cgroup": "0::/\n"}, 0),
    "v2 root": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
    "v2 max": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 0),
    "v2 parent is smaller": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/cpu.max": "100000 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
        },
        1,
    ),
    "v2 path outside the mount": (
        {"proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"},
        3,
    ),
    "v2 tiny": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1000 100000\n"}, 1),
    "v1": (
        {
            "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/docker/x\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
        },
        3,
    ),
    "v1 unlimited": (
        {
            "proc/self/cgroup": "4:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        0,
    ),
    "garbage": ({"proc/self/cgroup": "what\n::\n0::/\n", "sys/fs/cgroup/cpu.max": "lots"}, 0),
    "nothing": ({}, 0),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_quota(tmp_path, name):
    files, expected = QUOTAS[name]
    for path, text in files.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert native.get()._cgroup_cpus(str(tmp_path)) == expected
