"""The documentation against the code: options, variables, commands, names, links and runnable blocks."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import backend_core
from backend_core import Policy, manifest, policy
from backend_core.cli import main as cli
from backend_core.plugins import HOOKS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
IDS = [str(p.relative_to(ROOT)) for p in PAGES]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def table_rows(page: str) -> list[list[str]]:
    """Cells of all table rows, heads included."""
    lines = [line for line in FENCE.sub("", page).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def option_rows() -> dict[str, list[str]]:
    rows = {}
    for cells in table_rows(text("reference/options.md")):
        if re.fullmatch(r"`[a-z]+`", cells[0]):
            assert cells[0].strip("`") not in rows, f"{cells[0]} is there twice"
            rows[cells[0].strip("`")] = cells
    return rows


def documented_variables() -> set[str]:
    found = set()
    for cells in table_rows(text("reference/options.md")):
        found |= {c.strip("`") for c in cells[:2] if re.fullmatch(r"`MLX_ACCEL_[A-Z0-9_]+`", c)}
    return found


def test_every_option_is_in_the_table_with_its_values_and_default() -> None:
    rows = option_rows()
    assert set(rows) == set(Policy.keys())
    for field in dataclasses.fields(Policy):
        if field.name == "plugin_options":
            continue
        _, variable, values, default, meaning = rows[field.name]
        assert variable == f"`{policy.ENV_PREFIX}{field.name.upper()}`"
        assert meaning
        known: Any = policy._CHOICES.get(field.name, ())
        if isinstance(field.default, bool):
            known = ("1", "0")
        assert set(re.findall(r"`([a-z0-9]+)`", values)) >= {v for v in known if v}
        if field.default is False:
            assert default == "`0`"
        elif field.default:
            assert default == f"`{field.default}`"


def test_every_variable_that_the_code_reads_is_in_the_table_and_no_other() -> None:
    sources = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"]
    for folder in ("backend_core", "kernels", "plugins"):
        sources += [p for s in ("*.py", "*.cpp", "*.h", "*.txt", "*.cmake") for p in (ROOT / folder).rglob(s)]
    named = set()
    for path in sources:
        if "tests" not in path.relative_to(ROOT).parts and "build" not in path.relative_to(ROOT).parts:
            named |= set(re.findall(r"MLX_ACCEL_[A-Z_]*[A-Z](?![A-Z_])", path.read_text(encoding="utf-8")))
    of_policy = {policy.ENV_PREFIX + key.upper() for key in Policy.keys()}  # noqa: SIM118
    assert named >= {"MLX_ACCEL_BACKEND", "MLX_ACCEL_CACHE", "MLX_ACCEL_THREADS"}
    of_plugins = set()
    for file in (ROOT / "plugins").glob("*/src/*/mlx_accel.toml"):
        options = manifest.tomllib.loads(file.read_text(encoding="utf-8")).get("options", {})
        of_plugins |= {policy.ENV_PREFIX + name.upper() for name in options}
    assert "MLX_ACCEL_T5" in of_plugins
    assert documented_variables() == named | of_policy | of_plugins


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_variables_named_on_a_page_are_in_the_table(page: Path) -> None:
    named = set(re.findall(r"MLX_ACCEL_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_])", page.read_text(encoding="utf-8")))
    assert named <= documented_variables()


def commands(group: click.Group, prefix: str = "") -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found |= commands(command, f"{prefix}{name} ")
        else:
            found[prefix + name] = command
    return found


def test_every_subcommand_is_documented_with_all_its_options() -> None:
    page = text("reference/command-line.md")
    sections = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    known = commands(cli)
    assert set(sections) == set(known)
    for name, command in known.items():
        options = [o for p in command.params if isinstance(p, click.Option) for o in p.opts if o.startswith("--")]
        # --option is written in its short form.
        missing = [o for o in options if o not in sections[name] and o != "--option"]
        assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_shown_on_a_page_exist(page: Path) -> None:
    known = commands(cli)
    words = {w for name in known for w in name.split()}
    # Commands of the shipped plugins, up to the first dash.
    for project in (ROOT / "plugins").glob("*/pyproject.toml"):
        words |= set(re.findall(r'^([a-z]+)[a-z0-9-]* = ".+\.commands:', project.read_text(), re.MULTILINE))
    for word in re.findall(r"mlx-accel ([a-z]+)", "\n".join(_code(page.read_text(encoding="utf-8")))):
        assert word in words, word


def _code(page: str) -> list[str]:
    return re.findall(r"`[^`\n]+`", FENCE.sub("", page)) + [
        line for fence in FENCE.findall(page) for line in fence.splitlines() if line.startswith("$ mlx-accel")
    ]


def test_every_public_name_is_documented() -> None:
    page = text("reference/python.md")
    missing = [n for n in backend_core.__all__ if not re.search(rf"`{n}[`(]|, `{n}", page)]
    assert not missing


def test_every_hook_and_manifest_key_is_documented() -> None:
    page = text("how-it-works.md")
    assert all(f"`{hook}`" in page for hook in HOOKS)
    page = text("writing-a-plugin.md")
    assert all(f"`{key}`" in page or f"`{key}." in page for key in manifest._KEYS)


def test_everything_in_the_kernel_header_is_documented() -> None:
    header = (ROOT / "kernels" / "include" / "accel" / "kernel.h").read_text(encoding="utf-8")
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    names = set(re.findall(r"\b(?:accel_[a-z0-9_]+|ACCEL_[A-Z0-9_]+)\b", code))
    for struct in re.findall(r"typedef (?:struct|union) \w+ \{(.*?)\}", code, re.DOTALL):
        for declaration in struct.split(";"):
            if "(*" not in declaration and declaration.strip():
                names.add(declaration.split()[-1])
    page = text("reference/kernel-abi.md")
    missing = [n for n in sorted(names) if n != "ACCEL_KERNEL_H" and not re.search(rf"\b{n}\b", page)]
    assert not missing
    version = re.search(r"ACCEL_ABI_VERSION (\d+)u", header)
    assert version is not None and f"version **{version[1]}**" in page


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_relative_links_lead_somewhere(page: Path) -> None:
    source = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", source):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {_slug(h) for h in headings}, f"{target}: no such heading"


def _slug(heading: str) -> str:
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def runnable() -> list[Any]:
    """Blocks after ``<!-- runnable -->``; ``<!-- runnable: DIR -->`` adds a directory to sys.path."""
    found = []
    pattern = r"^<!-- runnable(?:: (\S+))? -->\n```python\n(.*?)^```$"
    for page, name in zip(PAGES, IDS, strict=True):
        blocks = re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        found += [pytest.param(*block, id=f"{name}-{i}") for i, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize(("folder", "code"), runnable())
def test_runnable_blocks_run(folder: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if folder:
        monkeypatch.syspath_prepend(str(ROOT / folder))
    before = set(sys.modules)
    try:
        exec(compile(code, "documentation", "exec"), {"__name__": "documentation"})
    finally:
        for name in [n for n in sys.modules if n not in before and folder]:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(ROOT / folder):
                del sys.modules[name]


def test_marks_are_followed_by_what_they_mark() -> None:
    """A mark that a test does not see would leave its block untested."""
    for page, name in zip(PAGES, IDS, strict=True):
        source = page.read_text(encoding="utf-8")
        for mark in re.findall(r"^<!-- (?:runnable|file).*-->\n.*", source, re.MULTILINE):
            assert mark.splitlines()[1].startswith("```"), f"{name}: {mark}"
    assert len(runnable()) >= 4
