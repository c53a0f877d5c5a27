"""Where the kernels come from, and what is said when they cannot be had."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from upstream_kernels import headers


def serve(monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str]) -> None:
    """pip finds a wheel of mlx-metal with these files, and no other index."""
    info = f"mlx_metal-{headers.version()}.dist-info"
    texts = {name: f"// {name}" for name in names}
    texts[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: mlx-metal\nVersion: {headers.version()}\n"
    texts[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{headers.PLATFORM}\n"
    texts[f"{info}/RECORD"] = ""
    with zipfile.ZipFile(folder / f"mlx_metal-{headers.version()}-py3-none-{headers.PLATFORM}.whl", "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_only_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = f"mlx/include/{headers.KERNELS}"
    links = tmp_path / "links"
    links.mkdir()
    serve(monkeypatch, links, [f"{kernels}/quantized.h", f"{kernels}/steel/defines.h", "mlx/lib/mlx.metallib"])
    cache = tmp_path / "cache"
    found = headers.fetched(cache)
    assert found == cache / "upstream" / f"mlx-metal-{headers.version()}"
    kept = sorted(str(p.relative_to(found / headers.KERNELS)) for p in found.rglob("*") if p.is_file())
    assert kept == ["quantized.h", "steel/defines.h"]
    assert [p.name for p in (cache / "upstream").iterdir()] == [found.name]
    # The second time nothing is downloaded.
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert headers.fetched(cache) == found


def test_a_wheel_without_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, tmp_path, ["mlx/lib/mlx.metallib"])
    with pytest.raises(headers.Unavailable, match=r"mlx_metal-.* has no .*quantized\.h"):
        headers.fetched(tmp_path / "cache")
    assert list((tmp_path / "cache" / "upstream").iterdir()) == []


def test_without_a_network_pip_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(headers.Unavailable, match=r"cannot be downloaded; pip said: .*mlx-metal"):
        headers.fetched(tmp_path)


def test_the_installed_kernels_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(headers, "installed", lambda: tmp_path / "there")
    assert headers.include_dir(tmp_path) == tmp_path / "there"
    monkeypatch.setattr(headers, "installed", lambda: None)
    with pytest.raises(headers.Unavailable):
        headers.include_dir(tmp_path)


@pytest.mark.upstream_kernels
def test_the_wheel_for_macs_has_the_same_kernels(mac_wheel: Path) -> None:
    """What the tests run is, byte for byte, what mlx-metal ships to Macs."""
    found = headers.installed()
    if found is None:
        pytest.skip("the installed mlx has no Metal kernels; the tests run those of the wheel")
    ours = {p.relative_to(found): p.read_bytes() for p in (found / headers.KERNELS).rglob("*") if p.is_file()}
    theirs = {p.relative_to(mac_wheel): p.read_bytes() for p in mac_wheel.rglob("*") if p.is_file()}
    assert len(theirs) > 50
    assert ours == theirs
