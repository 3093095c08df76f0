"""The plausibility rules on the published table and on tables with planted errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sweeps.plausible import IMPOSSIBLE, NOMINAL, SUSPICIOUS, Median, doubts, least_bound_us
from sweeps.published.data import pplx_garden
from sweeps.report_published import medians, plausibility_section

SIZES = (8, 16, 32, 64, 128)
SHAPES = (("decode", 128), ("prefill", 4096))


def clean() -> list[Median]:
    """A table that breaks no rule: twice the bound, per backend and transport a little more."""
    columns = (("a", "efa", 2.0), ("a", "cx7", 2.1), ("b", "cx7", 2.2))
    blank = [
        Median(workload, phase, ep, tokens, backend, transport, "me", factor)
        for workload, tokens in SHAPES
        for phase in ("dispatch", "combine")
        for ep in SIZES
        for backend, transport, factor in columns
    ]
    return [replace(v, median_us=v.median_us * least_bound_us(v, NOMINAL)) for v in blank]


def planted(phase: str, ep: int, column: str, factor: float) -> tuple[list[Median], Median]:
    """The clean table with one prefill value multiplied; the table and that value."""
    table = clean()
    where = next(
        i
        for i, v in enumerate(table)
        if (v.workload, v.phase, v.ep, v.column) == ("prefill", phase, ep, column)
    )
    table[where] = replace(table[where], median_us=table[where].median_us * factor)
    return table, table[where]


def test_published_table_has_exactly_two_impossible_values() -> None:
    found = doubts(medians(pplx_garden()))
    bad = [(d.value.cell, d.value.column, d.value.median_us) for d in found[:2]]
    assert bad == [
        ("prefill combine EP16", "pplx_garden cx7 upstream", 1062.2),
        ("prefill dispatch EP8", "pplx_garden cx7 upstream", 5071.1),
    ]
    assert [d.severity for d in found] == [IMPOSSIBLE] * 2 + [SUSPICIOUS] * (len(found) - 2)
    assert "bound" in found[0].reason
    assert "EP16" in found[1].reason


def test_published_suspicions() -> None:
    found = {(d.value.cell, d.value.backend) for d in doubts(medians(pplx_garden()))[2:]}
    assert found == {
        ("decode combine EP16", "uccl_ep"),
        ("prefill dispatch EP8", "deepep"),
        ("prefill dispatch EP16", "deepep"),
        ("prefill dispatch EP32", "deepep"),
    }


def test_clean_table_is_not_doubted() -> None:
    assert doubts(clean()) == []


@pytest.mark.parametrize("ep", SIZES)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_planted_value_below_the_bound(phase: str, ep: int) -> None:
    table, value = planted(phase, ep, "b cx7 me", 0.4)
    bad = [d for d in doubts(table) if d.severity == IMPOSSIBLE]
    assert [d.value for d in bad] == [value]


@pytest.mark.parametrize("column", ["a efa me", "a cx7 me"])
def test_planted_value_far_above_its_neighbour_and_its_twin(column: str) -> None:
    # EP16 takes about twice EP8, so 4 x is out of order by about 2 x.
    table, value = planted("combine", 8, column, 8.0)
    bad = [d for d in doubts(table) if d.severity == IMPOSSIBLE]
    assert [d.value for d in bad] == [value]


def test_without_a_twin_disorder_is_only_suspicious() -> None:
    table, value = planted("combine", 8, "b cx7 me", 8.0)
    found = doubts(table)
    assert {d.severity for d in found} == {SUSPICIOUS}
    assert value in {d.value for d in found}


def test_between_nodes_another_nic_is_no_twin() -> None:
    table, value = planted("combine", 64, "a cx7 me", 4.0)
    found = doubts(table)
    assert {d.severity for d in found} == {SUSPICIOUS}
    assert value in {d.value for d in found}


def test_disorder_just_above_and_below_the_limit() -> None:
    table = clean()
    small = next(v for v in table if (v.cell, v.column) == ("decode combine EP16", "b cx7 me"))
    large = next(v for v in table if (v.cell, v.column) == ("decode combine EP32", "b cx7 me"))

    def reasons(ratio: float) -> list[str]:
        changed = [
            replace(v, median_us=large.median_us * ratio) if v == small else v for v in table
        ]
        return [d.reason for d in doubts(changed) if d.value.cell == small.cell]

    assert not any("EP32" in reason for reason in reasons(1.09))
    assert any("EP32" in reason for reason in reasons(1.11))


def test_section_names_both_values() -> None:
    section = plausibility_section(pplx_garden())
    text = str(section)
    assert text.startswith("Section(title='Plausibility")
    assert "2 values cannot be right" in text
    assert "1062.2" in text
    assert "5071.1" in text
