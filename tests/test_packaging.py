"""README runs as printed; who may import whom; files and functions stay short."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("transport", "numba_ep")
# "About 300" and "about 50": a tenth more is still about.
MAX_FILE_LINES = 330
MAX_FUNCTION_LINES = 55

# A module imports only modules of lines above its own, also inside of functions.
LAYERS = """
transport.wr transport.jit
transport.atomics_jit transport.atomics_python
transport.atomics
transport.base transport.process transport.statistics
transport.cuda_driver transport.cuda_call transport.fifo transport.post_log
transport.verbs_device transport.verbs_queue transport.service
transport.verbs_resources transport.verbs_cuda
transport.shm transport.verbs
transport.shm_cuda
transport.proxy
transport

numba_ep.slot numba_ep.handle numba_ep.reference numba_ep.arrays
numba_ep.config
numba_ep.device.memory numba_ep.device.memory_ir numba_ep.device.cores
numba_ep.device.pool numba_ep.device.cuda_ir numba_ep.device.cpu_rows
numba_ep.device.cuda_lanes numba_ep.device.cuda_rows numba_ep.device.cuda_runtime
numba_ep.device.cpu numba_ep.device.python numba_ep.device.cuda
numba_ep.device
numba_ep.kernels.records
numba_ep.bounce numba_ep.errors numba_ep.kernels.events
numba_ep.kernels.tracing numba_ep.perfetto
numba_ep.kernels.waiting numba_ep.trace_plot
numba_ep.kernels.fifo numba_ep.kernels.row_copy numba_ep.kernels.sums
numba_ep.kernels.channel
numba_ep.kernels.sender numba_ep.kernels.rows
numba_ep.kernels.receiver numba_ep.kernels.verdict
numba_ep.kernels.cast numba_ep.kernels.layout numba_ep.kernels.notify
numba_ep.kernels.dispatch numba_ep.kernels.combine
numba_ep.kernels
numba_ep.spawn
numba_ep.group
numba_ep.checks numba_ep.meeting numba_ep.closing numba_ep.results numba_ep.clocks
numba_ep.endpoint
numba_ep.operation
numba_ep.dispatch numba_ep.combine
numba_ep.buffer
numba_ep.cast numba_ep.trace
numba_ep.selfcheck numba_ep.ring_history
numba_ep.tuning numba_ep.view
numba_ep.report
numba_ep.test
"""
LINES = LAYERS.splitlines()
LEVEL = {name: level for level, line in enumerate(LINES) for name in line.split()}

# What numba_ep may take from transport, and where.
ANYWHERE = ["numba_ep/*"]
BORDER = {
    "transport.wr": ANYWHERE,
    "transport.atomics": ANYWHERE,
    "transport.base": ANYWHERE,  # the protocol
    # The factory; the devices want the folder, whose content names their caches.
    "transport": ["numba_ep/endpoint.py", "numba_ep/device/*"],
    "transport.jit": ["numba_ep/device/*"],
    "transport.cuda_driver": ["numba_ep/device/*"],
    # The endpoint makes the FIFOs and the thread that drains them into the transport.
    "transport.fifo": ["numba_ep/endpoint.py"],
    "transport.proxy": ["numba_ep/endpoint.py"],
    "transport.post_log": ["numba_ep/trace.py"],
}

# Packages that not every machine has, or that are slow or heavy to load.
CONFINED = {
    "numba.cuda": ["numba_ep/device/cuda*.py"],
    "cuda": ["numba_ep/device/cuda*.py", "transport/*cuda*.py"],
    "pyverbs": ["transport/verbs*.py"],
    "mpi4py": ["numba_ep/group.py"],
    "torch": ["numba_ep/group.py", "numba_ep/arrays.py"],
    "cupy": ["numba_ep/device/cuda*.py", "numba_ep/arrays.py"],
    "matplotlib": ["numba_ep/trace_plot.py", "numba_ep/view.py"],
    "rich": ["numba_ep/report.py"],
}
# Imported inside of functions only.
LAZY = ("mpi4py", "torch", "cupy", "matplotlib", "rich")


class Import(NamedTuple):
    """One imported module, written out in full."""

    path: str
    line: int
    module: str
    at_top: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
MODULES = {module_name(path) for path in FILES}


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def modules_of(node: ast.AST) -> list[str]:
    """`from package import name` counts as package.name where that is a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute in this project"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        known = [name for name in names if name in MODULES or name == "numba.cuda"]
        rest = [str(node.module)] if len(known) < len(names) else []
        return known + rest
    return []


def imports_in(node: ast.AST, path: Path, at_top: bool = True) -> Iterator[Import]:
    name = str(path.relative_to(ROOT))
    for child in ast.iter_child_nodes(node):
        if is_for_types_only(child):
            continue
        for module in modules_of(child):
            yield Import(name, getattr(child, "lineno", 0), module, at_top)
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports_in(child, path, at_top and not inside)


IMPORTS = [found for path, tree in TREES.items() for found in imports_in(tree, path)]


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def is_allowed(path: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def report(wrong: list[Import]) -> list[str]:
    return [f"{found.path}:{found.line} imports {found.module}" for found in wrong]


def test_every_module_has_a_place_in_the_layers() -> None:
    # The package itself stands below: it loads nothing before a name is asked for.
    assert MODULES - set(LEVEL) - {"numba_ep"} == set()


def test_imports_go_downwards_only() -> None:
    wrong = []
    for found in IMPORTS:
        level = LEVEL.get(module_name(ROOT / found.path), len(LINES))
        if LEVEL.get(found.module, -1) >= level:
            wrong.append(found)
    assert report(wrong) == []


def test_only_the_package_itself_looks_names_up_in_it() -> None:
    """`import numba_ep` inside of it is for the folder and version, not for Buffer."""
    allowed = {"numba_ep.__file__", "numba_ep.__version__"}
    wrong = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                if node.value.id == "numba_ep" and name not in allowed:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} uses {name}")
            if isinstance(node, ast.ImportFrom) and node.module == "numba_ep":
                names = {f"numba_ep.{alias.name}" for alias in node.names}
                if path.name != "__init__.py" and not names <= MODULES:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {names}")
    assert wrong == []


def test_transport_never_imports_numba_ep() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.path.startswith("transport/") and is_in(found.module, "numba_ep")
    ]
    assert report(wrong) == []


def test_what_crosses_the_package_border() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.path.startswith("numba_ep/")
        and is_in(found.module, "transport")
        and not is_allowed(found.path, BORDER.get(found.module, []))
    ]
    assert report(wrong) == []


@pytest.mark.parametrize("package", CONFINED)
def test_where_a_package_may_be_imported(package: str) -> None:
    wrong = [
        found
        for found in IMPORTS
        if is_in(found.module, package)
        and (
            not is_allowed(found.path, CONFINED[package])
            or (package in LAZY and found.at_top)
        )
    ]
    assert report(wrong) == []


def run_python(code: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_importing_starts_nothing() -> None:
    code = (
        "import sys, numba_ep, transport\n"
        "print(*sys.modules)\n"
        "print('libcuda' in open('/proc/self/maps').read())\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    names, libcuda = done.stdout.splitlines()
    heavy = ("numba.cuda", "cuda", "cupy", "torch", "mpi4py", "pyverbs")
    parts = ("numba_ep.kernels", "numba_ep.device")
    loaded = [
        name
        for name in names.split()
        if any(is_in(name, package) for package in (*heavy, *parts))
    ]
    assert loaded == []
    assert libcuda == "False"


def test_unknown_names_of_the_package() -> None:
    import numba_ep

    with pytest.raises(AttributeError, match="no attribute 'buffet'"):
        _ = numba_ep.buffet
    for name in numba_ep.__all__:
        assert getattr(numba_ep, name) is not None


# The README.


def readme_block(name: str) -> str:
    """The fenced block after the comment <!-- name -->."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(rf"<!-- {name} -->\n```\w*\n(.*?)```\n", text, re.DOTALL)
    assert len(found) == 1, f"README.md: expected one block <!-- {name} -->"
    return str(found[0])


def test_quickstart_runs_as_printed() -> None:
    done = run_python(readme_block("quickstart"), timeout_s=240.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == readme_block("quickstart-prints")


def test_readme_counts_lines() -> None:
    """The reading order names every file once, with its lines to about a fifth."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"\[`([\w/.]+\.py)`\]\([\w/.]+\) +\| +(\d+)", text))
    for name, lines in told.items():
        count = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert abs(count - int(lines)) <= max(10, count // 5), f"{name}: {count} lines"
    assert "numba_ep/buffer.py" in told


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            found = page.parent / file if file else page
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), target


def test_picture_is_what_its_script_draws() -> None:
    script = runpy.run_path(str(ROOT / "docs/draw_dataflow.py"))
    drawn = (ROOT / "docs/dataflow.svg").read_text(encoding="utf-8")
    assert script["drawing"]() == drawn, "run python docs/draw_dataflow.py"


# Sizes.


def test_no_file_is_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in FILES
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from def to the end, without the docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return lines


def test_no_function_is_long() -> None:
    wrong = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = code_lines(node)
                if lines > MAX_FUNCTION_LINES:
                    wrong[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = lines
    assert wrong == {}
