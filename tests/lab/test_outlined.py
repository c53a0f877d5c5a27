"""Functions that are compiled on their own and are given structures are told from those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_core.testing.lab import compiler, outlined

pytestmark = pytest.mark.lab

TEXT = "typedef lab_types::bare_t<decltype(ns::k<float>)> lab_signature_0; Two made(float x); float f(float);"


@pytest.mark.parametrize(
    ("symbol", "takes"),
    [
        ("f(float)", False),
        ("f(float const*, unsigned int, bool, unsigned long)", False),
        ("void f<_Float16>(float (*) [4][4], metal::vec<unsigned int, 4> const*, int)", False),
        ("f(metal::vec<float, 4>&, metal::mem_flags)", False),
        ("f(bfloat)", True),
        ("f(float const*, metal::vec<float, 4>) [clone .isra.0]", True),
        ("float g<Two, 3>(Two)", True),
        ("metal::vec<float, 4> g<float>(float)", True),
        ("made(float)", True),
        ("bfloat::operator float() const", False),
        ("Loader<float, 4>::next(unsigned int) const", False),
        ("void ns::k<float>(float const*, metal::vec<unsigned int, 3>)", False),
    ],
)
def test_names(symbol: str, takes: bool) -> None:
    kernels = set(outlined._KERNELS.findall(TEXT))
    assert kernels == {"ns::k"}
    assert outlined._takes_values(symbol, kernels, TEXT) is takes


def test_object_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(text: str) -> Path:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.o"
        done = compiler._run([*compiler.find_compiler().command, "-x", "c++", "-c", "-", "-o", str(out)], text)
        assert done.returncode == 0, done.stderr
        return out

    numbers = "float f(float x, const int* p) { return x + *p; }"
    assert not outlined.hands_over_values(built(numbers), numbers)
    value = "struct Two { float a, b; }; float f(Two t) { return t.a; }"
    assert outlined.hands_over_values(built(value), value)
    result = "struct Two { float a, b; }; Two f(float x) { return {x, x}; }"
    assert outlined.hands_over_values(built(result), result)
    assert outlined.hands_over_values(tmp_path / "none.o", numbers)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert outlined.hands_over_values(built_already := tmp_path / "0.o", numbers), built_already
