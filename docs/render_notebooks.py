"""Runs the notebooks and writes what they show into docs/notebooks, for reading only.

    python docs/render_notebooks.py              # all
    python docs/render_notebooks.py 00_tour ...  # some

Before, it strips a notebook that was saved with its outputs. Pictures become files
beside the pages. A change of a picture's bytes alone, which every
run makes, is no reason to commit it.
"""

from __future__ import annotations

import base64
import copy
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
PAGES = ROOT / "docs" / "notebooks"
CELL_LIMIT_S = 180
SOLUTION = re.compile(r"<details>.*?```python\n(.*?)```", re.DOTALL)
IMAGES = {"image/png": "png", "image/gif": "gif"}


def load(path: Path) -> Any:
    """A notebook as it is stored."""
    return nbformat.read(path, as_version=4)


def stripped(notebook: Any) -> str:
    """Its file without outputs, counts and what Jupyter notes about the machine."""
    bare = copy.deepcopy(notebook)
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    bare.metadata = {"kernelspec": spec, "language_info": {"name": "python"}}
    for cell in bare.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return str(nbformat.writes(bare)) + "\n"


def with_solutions(notebook: Any) -> Any:
    """The same with the folded solutions as cells, each behind its own text."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "markdown":
            for code in SOLUTION.findall(cell.source):
                cells.append(nbformat.v4.new_code_cell(code))
    notebook.cells = cells
    return notebook


def execute(notebook: Any) -> Any:
    """Run all cells in a Jupyter kernel of its own; raises the first error."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
    client = NotebookClient(
        notebook, timeout=CELL_LIMIT_S, kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    )  # fmt: skip
    return client.execute(env=environment)


def for_page(text: str) -> str:
    """Markdown of a notebook with its links as they are seen from docs/notebooks."""
    return text.replace("](../docs/", "](../").replace(".ipynb)", ".md)")


def page(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """The page's text, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(for_page(cell.source))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            kind = next((kind for kind in IMAGES if kind in data), None)
            if kind is not None:
                number = f"_{len(pictures)}" if f"{cell.id}.png" in pictures else ""
                file = f"{cell.id}{number}.{IMAGES[kind]}"
                pictures[file] = base64.b64decode(data[kind])
                alt = cell.id.replace("-", " ")
                parts.append(f"![{alt}]({name}/{file})")
            elif "text/markdown" in data:
                parts.append(data["text/markdown"])
            else:
                text = output.get("text") or data.get("text/plain", "")
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def render(path: Path) -> None:
    """Strip one notebook, run it, and write its page and pictures."""
    name, notebook = path.stem, load(path)
    path.write_text(stripped(notebook), encoding="utf-8")
    text, pictures = page(execute(notebook), name)
    note = f"<!-- python docs/render_notebooks.py {name} -->\n\n"
    folder = PAGES / name
    folder.mkdir(parents=True, exist_ok=True)
    (PAGES / f"{name}.md").write_text(note + text, encoding="utf-8")
    for old in folder.iterdir():
        old.unlink()
    for file, content in pictures.items():
        (folder / file).write_bytes(content)


def main(names: list[str]) -> None:
    """Render the named notebooks, or all."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not names or path.stem in names:
            start = time.monotonic()
            print(f"{path.stem} ...", end=" ", flush=True)
            render(path)
            print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
