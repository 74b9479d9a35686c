"""The notebooks and their solutions run; they are stored clean and rendered."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = ROOT / "docs" / "notebooks"
NAMES = [path.stem for path in PATHS]
LIMIT_BYTES = 4_000_000

each = pytest.mark.parametrize("path", PATHS, ids=NAMES)


@pytest.fixture(scope="module")
def renderer() -> Any:
    return runpy.run_path(str(ROOT / "docs/render_notebooks.py"))


@each
def test_it_runs_with_its_solutions(path: Path, renderer: Any) -> None:
    notebook = renderer["execute"](renderer["with_solutions"](renderer["load"](path)))
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    printed = "".join(out.text for out in outputs if out.get("name") == "stdout")
    assert "✅" in printed
    assert [out.text for out in outputs if out.get("name") == "stderr"] == []
    # The page shows the kernels as they are now.
    page = (PAGES / f"{path.stem}.md").read_text(encoding="utf-8")
    sources = [out.data.get("text/markdown", "") for out in outputs if "data" in out]
    way_out = f"run python docs/render_notebooks.py {path.stem}"
    assert [text for text in sources if text not in page] == [], way_out
    # The exercise as it stands, and then its solution, which the page folds away.
    asked = re.findall("⬜ your turn: (.*)", printed)
    assert asked
    assert [text for text in asked if f"✅ {text}" not in printed] == []


@each
def test_it_is_stored_without_outputs(path: Path, renderer: Any) -> None:
    notebook, text = renderer["load"](path), path.read_text(encoding="utf-8")
    way_out = f"run python docs/render_notebooks.py {path.stem}"
    assert text == renderer["stripped"](notebook), way_out
    # Ids name pictures, and stay when the notebook is run again.
    ids = [cell.id for cell in notebook.cells]
    assert [name for name in ids if not re.fullmatch("[a-z][a-z0-9-]*", name)] == []


@each
def test_its_page_is_of_this_notebook(path: Path, renderer: Any) -> None:
    """The code and the text are the same; nobody compares pictures."""
    page = (PAGES / f"{path.stem}.md").read_text(encoding="utf-8")
    way_out = f"run python docs/render_notebooks.py {path.stem}"
    for cell in renderer["load"](path).cells:
        assert renderer["for_page"](cell.source) in page, way_out
    assert "Traceback" not in page


def test_pages_are_complete_and_small() -> None:
    assert NAMES == sorted(page.stem for page in PAGES.glob("[0-9]*.md"))
    pages = [*PAGES.glob("*.md")]
    linked = set()
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                file = (PAGES / target).resolve()
                assert file.exists(), f"{page.name}: {target}"
                linked.add(file)
    files = {file for file in PAGES.rglob("*") if file.is_file()}
    unused = files - linked - {PAGES / "README.md"}
    assert unused == set()
    assert sum(file.stat().st_size for file in files) < LIMIT_BYTES
