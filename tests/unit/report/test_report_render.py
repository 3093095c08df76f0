"""Rendering: text within the page, Markdown that a code host shows well."""

from __future__ import annotations

import io

import pytest

from sweeps.render_markdown import markdown
from sweeps.render_text import print_report
from sweeps.tablefmt import Cell, Section, Table, Verbatim, better, text_table


def test_only_a_value_that_beats_another_is_better() -> None:
    assert better([2.0, 1.0, None, 1.0], lower_is_better=True) == [False, True, False, True]
    assert better([2.0, 1.0, None, 1.0], lower_is_better=False) == [True, False, False, False]
    assert better([2.0, None], lower_is_better=True) == [False, False]
    assert better([2.0, 2.0], lower_is_better=True) == [False, False]
    assert better([2.0, 1.0], lower_is_better=None) == [False, False]


def test_plain_text_marks_the_better_value_and_cuts_nothing() -> None:
    wide = tuple(f"a_heading_of_column_{n}" for n in range(30))
    long = "reason " * 40
    table = Table("t", wide, (tuple(Cell(f"{n}.125", n == 3) for n in range(30)),))
    out = io.StringIO()
    print_report("title", [Section("s", (table, text_table("", ("x",), [(long,)])))], out)
    printed = out.getvalue()
    assert "3.125 *" in printed
    assert printed.count("*") == 1
    assert all(f"{n}.125" in printed for n in range(30))
    assert printed.count("reason") == 40
    assert "\x1b" not in printed
    (line,) = [line for line in printed.splitlines() if "3.125 *" in line]
    assert "29.125" in line


def test_markdown_of_a_table_is_exact() -> None:
    table = Table("t", ("", "arm_1\nµs"), ((Cell("x"), Cell("2", better=True)),))
    expected = "# T\n\n## S\n\n### t\n\n|  | arm\\_1<br>µs |\n| --- | ---: |\n| x | **2** |\n"
    assert markdown("T", [Section("S", (table,))]) == expected


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="'t' has 2 columns, a row has 1"):
        text_table("t", ("a", "b"), [(1,)])


def test_headings_stand_over_their_groups_and_numbers_below_one_another() -> None:
    first = (Cell("EP2"), Cell("9.5", better=True), Cell("10.5"))
    second = (Cell("EP2"), Cell("8.5"), Cell(""))
    rows = (first, second)
    table = Table("", ("", "dispatch µs\ngloo", "dispatch µs\nnccl"), rows)
    out = io.StringIO()
    print_report("t", [Section("s", (table,))], out)
    assert out.getvalue().splitlines()[3:] == [
        "      dispatch µs",
        "      ───────────",
        "       gloo  nccl",
        "─────────────────",
        "EP2   9.5 *  10.5",
        "      8.5",
    ]


def test_a_wide_table_is_cut_between_groups_and_keeps_its_labels() -> None:
    columns = ("arm", *[f"group {g}\nmetric {m}" for g in "abc" for m in range(8)])
    row = (Cell("gloo"), *[Cell(f"{n}.25") for n in range(24)])
    section = Section("s", (Table("t", columns, (row,)),))
    out = io.StringIO()
    print_report("title", [section], out)
    assert max(len(line) for line in out.getvalue().splitlines()) <= 120
    assert out.getvalue().count("gloo") == 3
    text = markdown("title", [section])
    assert [line for line in text.splitlines() if line.startswith("###")] == ["### t"]
    assert text.count("| gloo |") == 3
    assert all(f" {n}.25 " in text for n in range(24))


def test_a_long_text_takes_less_room_before_the_page_is_exceeded() -> None:
    table = text_table("", ("arm", "reason", "more"), [("a", "x-y " * 40, "word " * 40)])
    out = io.StringIO()
    print_report("t", [Section("", (table,))], out)
    printed = out.getvalue()
    assert max(len(line) for line in printed.splitlines()) <= 120
    assert (printed.count("x-y"), printed.count("word")) == (40, 40)


def test_markdown_shows_code_as_code_and_folds_long_texts_away() -> None:
    long = "\n".join(f"line {n} of `log`" for n in range(30)) + "\n```"
    blocks = ("`max_num_seqs` of my_arm <b>", Verbatim("a_b <c>", "x_y"), Verbatim("l", long))
    text = markdown("T", [Section("", blocks)])
    assert "`max_num_seqs` of my\\_arm &lt;b>" in text
    assert "a\\_b &lt;c>\n\n```text\nx_y\n```" in text
    assert f"<details><summary>l</summary>\n\n````text\n{long}\n````\n\n</details>" in text
