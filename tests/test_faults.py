"""docs/faults.md against the tests: every case has tests of its number, or says why."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = "01 03 04 05 06 07 11 12 14 16 17 20 21 22 23 25 26 27 28 31 32 35 36 38 39 40 "
CASES += "42 43 44 45 47 48 50 51 52 55 56 57 58 60 64"


def rows_of_the_page() -> dict[str, str]:
    text = (HERE.parent / "docs" / "faults.md").read_text()
    return dict(re.findall(r"^\| C(\d\d) \|.*\| (.*) \|$", text, re.MULTILINE))


def numbers_of_the_tests() -> set[str]:
    names = r"^ *def test_c(\d\d)_"
    paths = HERE.glob("test_*.py")
    return {n for p in paths for n in re.findall(names, p.read_text(), re.MULTILINE)}


def test_every_case_has_a_row() -> None:
    assert list(rows_of_the_page()) == CASES.split()


def test_every_row_is_true() -> None:
    tested = numbers_of_the_tests()
    for number, here in rows_of_the_page().items():
        if here.startswith("tests"):
            assert number in tested, f"C{number}: no test is named after it"
        else:
            assert len(here) > 40, f"C{number}: say why it has no test"
    assert tested <= set(rows_of_the_page())
