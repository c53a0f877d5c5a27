"""Finds a C++ compiler, compiles kernel text with the lab's library, keeps the result.

Compiled kernels lie in ``<cache>/lab``, named after a hash of everything that went into them: text, compiler,
options, processor, the lab's own files. They are built beside and renamed, so that two processes may build the
same one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...paths import CACHE_ENV, cache_dir
from .errors import CompilerMissing, LabError
from .outlined import hands_over_values

# Accesses keep the width that the kernel's text gives them (no merging, splitting or widening), half is rounded
# after every operation, locals that nobody has written hold a pattern, and checks report instead of ending the process.
# Messages need lines and inlined functions, but no variables, which take a fifth of the time to compile.
_GCC_FLAGS = [
    "-fno-tree-sra", "-fno-ipa-sra", "-fno-store-merging", "-fno-tree-vectorize", "-fno-tree-slp-vectorize",
    "-fno-tree-loop-distribute-patterns", "-fno-var-tracking", "-fno-var-tracking-assignments",
    "-fsanitize=bounds-strict",
]  # fmt: skip
_CLANG_FLAGS = [
    "-fno-vectorize", "-fno-slp-vectorize", "-fexcess-precision=16", "-fno-sanitize-trap=all",
    "-fsanitize-recover=all", "-mllvm", "-tsan-instrument-read-before-write", "-fstrict-flex-arrays=3",
]  # fmt: skip
_KERNEL_FLAGS = [
    "-std=c++20", "-O1", "-g1", "-gdwarf-4", "-pipe", "-fPIC", "-w", "-fsigned-char", "-fno-exceptions", "-fno-rtti",
    "-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno", "-Wno-reserved-user-defined-literal",
    "-ftrivial-auto-var-init=pattern", "-fno-finite-loops", "-fno-semantic-interposition",
    "-fsanitize=thread,alignment,signed-integer-overflow,integer-divide-by-zero,bounds",
]  # fmt: skip
_RUNTIME_FLAGS = ["-std=c++20", "-O2", "-fPIC"]

#: In places of compiled kernels, which are kept and so must not say in which folders they were made: what names begin
#: with that are relative in the kernel's text, and names of the lab's own files.
TEXT_FOLDER, OWN_FOLDER = "/lab-text/", "lab-own/"


@dataclass(frozen=True)
class Compiler:
    """A command that compiles C++20, and what tells it from others."""

    command: tuple[str, ...]
    version: str
    gcc: bool


def lab_files() -> Path:
    """The folder of the lab's C++ files: in the source tree, or in the installed package."""
    source = Path(__file__).resolve().parents[3] / "kernels" / "lab"
    if source.is_dir():
        return source
    installed = Path(str(importlib.resources.files("backend_core.testing.lab"))) / "device"
    if installed.is_dir():
        return installed
    raise LabError(f"the lab's own files are missing (looked in {installed} and {source}); reinstall mlx-accel")


@functools.lru_cache(maxsize=4)
def _probe(wanted: str | None) -> Compiler:
    for command in [wanted] if wanted else ["g++", "clang++"]:
        first, *options = shlex.split(command)
        path = shutil.which(first)
        if path is None:
            continue
        path = os.path.abspath(path)
        done = subprocess.run([path, *options, "--version"], capture_output=True, text=True)
        if done.returncode == 0:
            return Compiler((path, *options), done.stdout.splitlines()[0], "clang" not in done.stdout)
    if wanted:
        raise CompilerMissing(f"the compiler {wanted!r}, which CXX names, cannot be run")
    raise CompilerMissing(
        "no C++ compiler: install g++ or clang++ (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`)"
    )


def find_compiler() -> Compiler:
    """The compiler that CXX names, else g++, else clang++. Raises :class:`CompilerMissing`."""
    return _probe(os.environ.get("CXX") or None)


@functools.lru_cache(maxsize=8)
def _linker(compiler: Compiler) -> tuple[str, ...]:
    """g++ with gold links a kernel in half the time, which is a tenth of all."""
    if not compiler.gcc:
        return ()
    asked = _run([*compiler.command, "-print-prog-name=ld.gold"]).stdout.strip()
    return ("-fuse-ld=gold",) if shutil.which(asked) else ()


@functools.lru_cache(maxsize=1)
def _cpu_flags() -> tuple[str, ...]:
    """Options for what this processor has: without f16c every half costs a call."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        words = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M).group(1).split())  # type: ignore[union-attr]
    except (OSError, AttributeError):
        return ()
    return tuple(f"-m{name}" for name in ("f16c", "fma", "avx2") if name in words)


def _own_flags(compiler: Compiler) -> list[str]:
    if not compiler.gcc:
        return _CLANG_FLAGS
    number = re.search(r"(\d+)\.\d+\.\d+", compiler.version)
    newer = number is not None and int(number.group(1)) >= 13  # 12 rounds anyway, and refuses to be told
    return [*_GCC_FLAGS, *(["-fexcess-precision=16"] if newer else [])]


@functools.lru_cache(maxsize=1)
def _files_hash() -> str:
    digest = hashlib.sha256()
    root = lab_files()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


_folder: Path | None = None


def use_cache(folder: Path | None) -> None:
    """Keeps compiled kernels in this folder from now on; None goes back to ``lab`` in the user's cache.

    For test suites, which change the user's cache from test to test but want to compile a kernel once.
    """
    global _folder
    _folder = folder


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return _folder if _folder is not None else cache_dir() / "lab"


def _key(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in (find_compiler(), _files_hash(), _cpu_flags(), *parts):
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()[:24]


def _run(command: list[str], stdin: str | None = None, folder: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, LC_ALL="C")
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, cwd=folder)


def preprocess(text: str, texts: dict[str, str], include_dirs: tuple[str, ...], defines: tuple[str, ...]) -> str:
    """Runs the preprocessor over Metal text, with the macros a Metal compiler defines and none of the host's.

    Its output is remembered, but for text that includes other files than the lab's own: those may have changed.
    """
    work = _preprocess.__wrapped__ if _reads_files(text) else _preprocess
    return work(find_compiler(), text, tuple(texts.items()), include_dirs, defines)


def _reads_files(text: str) -> bool:
    stubs = lab_files() / "stubs"
    other = re.sub(
        r"^[ \t]*#[ \t]*include[ \t]*<([\w/.]+)>",
        lambda m: "" if (stubs / m.group(1)).is_file() else m.group(),
        text,
        flags=re.M,
    )
    return any(word in other for word in ("include", "import", "embed"))


@functools.lru_cache(maxsize=512)
def _preprocess(
    compiler: Compiler,
    text: str,
    texts: tuple[tuple[str, str], ...],
    include_dirs: tuple[str, ...],
    defines: tuple[str, ...],
) -> str:
    command = [
        *compiler.command, "-x", "c++", "-std=c++17", "-E", "-undef", "-nostdinc", "-D__METAL__=1",
        "-D__METAL_VERSION__=310", "-D__METAL_MACOS__=1", "-D__HAVE_BFLOAT__=1", *(f"-D{d}" for d in defines),
        f"-I{lab_files() / 'stubs'}", *(f"-I{d}" for d in include_dirs), "-",
    ]  # fmt: skip
    done = _run(command, text)
    if done.returncode:
        raise LabError(describe_errors(done.stderr, dict(texts)))
    return done.stdout


def source_line(file: str, number: int, texts: dict[str, str]) -> str:
    """The text of a line, numbered from 1, of one of these texts or of a file; ``""`` if it is not there."""
    text = texts.get(file)
    if text is None:
        try:
            text = Path(file).read_text(errors="replace")
        except OSError:
            return ""
    lines = text.splitlines()
    return lines[number - 1] if 0 < number <= len(lines) else ""


def shown(file: str, number: int, message: str, texts: dict[str, str]) -> list[str]:
    """An error at a line, and that line."""
    line = source_line(file, number, texts)
    return [f"{file}:{number}: error: {message}", *([f"    {number} | {line}"] if line else [])]


def _make_folder() -> Path:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise LabError(
            f"compiled kernels cannot be kept in {folder}: {e.strerror}; set {CACHE_ENV} or call lab.use_cache(folder)"
        ) from None
    return folder


def _build_runtime() -> Path:
    folder = cache_folder()
    target = folder / f"runtime-{_key(_RUNTIME_FLAGS)}.o"
    if not target.exists():
        folder = _make_folder()
        source = lab_files() / "runtime" / "runtime.cpp"
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "runtime.o"
            done = _run([*find_compiler().command, *_RUNTIME_FLAGS, "-c", str(source), "-o", str(built)])
            if done.returncode:
                raise LabError(f"the lab's runtime does not compile:\n{done.stderr}")
            os.replace(built, target)
    return target


def build(text: str, texts: dict[str, str]) -> Path:
    """Compiles rewritten kernel text to a shared object and returns its path; from the cache if it is there.

    texts
        Kernel text by file name, for messages. Raises :class:`LabError` with the compiler's message.
    """
    compiler = find_compiler()
    flags = [*_KERNEL_FLAGS, *_cpu_flags(), *_own_flags(compiler)]
    folder = cache_folder()
    target = folder / f"kernel-{_key(flags, TEXT_FOLDER, OWN_FOLDER, text)}.so"
    if target.exists():
        return target
    _make_folder()
    runtime = _build_runtime()
    with tempfile.TemporaryDirectory(dir=folder.resolve()) as scratch:
        source, built = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.so"
        source.write_text(text)
        object_file = Path(scratch) / "kernel.o"
        (Path(scratch) / OWN_FOLDER.rstrip("/")).symlink_to(lab_files() / "include")
        command = [*compiler.command, *flags]
        if "=" not in scratch:
            command.append(f"-fdebug-prefix-map={scratch}={TEXT_FOLDER.rstrip('/')}")
        command += [f"-I{OWN_FOLDER.rstrip('/')}", "-c", str(source), "-o", str(object_file)]
        done = _run(command, folder=scratch)
        if not done.returncode and hands_over_values(object_file, text):
            done = _run([*command, "-DLAB_INLINE_ALL"], folder=scratch)
        if done.returncode:
            raise LabError(describe_errors(done.stderr, texts))
        link = ["-shared", "-Wl,-Bsymbolic", "-Wl,--no-undefined", str(object_file), str(runtime)]
        done = _run([*compiler.command, *_linker(compiler), *link, "-lm", "-ldl", "-lrt", "-o", str(built)])
        if done.returncode:
            missing = sorted(set(re.findall(r"undefined (?:reference to [`']|symbol: )([^'\n]*)", done.stderr)))
            if missing:
                raise LabError(f"the kernel calls what is declared but has no body: {', '.join(missing)}")
            raise LabError(f"the compiled kernel cannot be linked:\n{done.stderr}")
        os.replace(built, target)
    return target


def describe_errors(stderr: str, texts: dict[str, str]) -> str:
    """The compiler's errors, each followed by its line of the kernel's text; at most ten.

    An error in the lab's own headers is shown where the kernel's text led there. What remains without a place in
    the text mostly follows from the errors that have one, and is shown only if there are none of these.
    """
    own = str(lab_files())
    own_text: list[str] = []
    others: list[str] = []
    led: tuple[str, int] | None = None  # the last place in the text that the compiler came through (g++)
    waiting = ""  # an error in a header whose place is still to come (clang)
    for line in stderr.splitlines():
        match = re.match(r"(.*?):(\d+):(?:(\d+):)? *(.*)", line)
        if not match:
            continue
        file, number, rest = match.group(1), int(match.group(2)), match.group(4)
        foreign = file == "lab" or file.startswith((own, OWN_FOLDER))
        error = re.match(r"(?:fatal )?error: (.*)", rest)
        if not error:
            if waiting and not foreign and rest.startswith("note:"):
                own_text += shown(file, number, waiting, texts)
                waiting = ""
            elif not foreign and "required from" in rest:
                led = (file, number)
            continue
        if not foreign:
            own_text += shown(file, number, error.group(1), texts)
        elif led:
            own_text += shown(*led, error.group(1), texts)
        else:
            others += shown(file, number, error.group(1), texts)
            waiting = error.group(1)
        led = None
    out = (own_text or others)[:20]
    return "the kernel does not compile:\n" + ("\n".join(out) if out else stderr)
