"""What the published tables cannot show, and which of their values are to be doubted.

Blanks are counted in the data: a sentence leaves the list by itself once its values are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from itertools import combinations, pairwise

from sweeps.published.data import RDMA, AllToAllRow, ServingRow


@dataclass(frozen=True)
class NotDerivable:
    """A sentence that a table cannot show, with the reason."""

    sentence: str
    reason: str


# (sentence, arm, column): the sentence needs this column of this arm in every cell.
_NEEDS_VALUES = (
    ("RDMA has the lower TPOT than TCP in all twelve cells", RDMA, "tpot_p50_ms"),
    ("wide TP has the lower TPOT than RDMA in all twelve cells", RDMA, "tpot_p50_ms"),
    ("RDMA lowers the tail of TTFT (p95) in every cell", RDMA, "ttft_p95_ms"),
    ("under load wide TP has the longer tail of TTFT (p95) than RDMA", RDMA, "ttft_p95_ms"),
    ("RDMA serves more requests per second than TCP", RDMA, "requests_per_s"),
    (
        "all three arms generated equally many tokens per request, so that their tokens/s compare",
        RDMA,
        "requests_per_s",
    ),
    ("all three arms received prompts of the same length", RDMA, "prompt_tokens_min"),
)

# (sentence, fields that would hold it, what is missing, in words)
_NEEDS_COLUMNS = (
    (
        "the traffic of the RDMA arm went over RDMA, that of the TCP arm over TCP",
        ("transport_seen",),
        "the arm's name says what was asked; no log line or byte counter is published",
    ),
    (
        "the arms ran on the same hardware, model and software",
        ("hardware", "versions", "model"),
        "none of them is a column of the table",
    ),
    (
        "a difference is larger than the noise between runs",
        ("repeat",),
        "one value per arm and cell, without repeats or spread",
    ),
    (
        "at c = 32 and 64 wide TP falls behind because of its parallel layout",
        ("max_num_seqs",),
        "wide TP is one engine and External DP several, each with its own admission limit; the "
        "limit is not a column and there is no arm with an equal total batch, so queueing and "
        "layout cannot be told apart",
    ),
    (
        "the rates hold in steady state",
        ("steady_tok_per_s",),
        "tokens/s is over the whole wall time of 32 to 256 requests, ramp-up and drain included",
    ),
    (
        "ITL p99 is the p99 of the time per token",
        ("chunk_tokens",),
        "tokens per streamed chunk are not published; a chunk with several tokens makes a gap "
        "longer than the time of one",
    ),
    (
        "the ranks shared the load as 285 + 284 x 3",
        ("endpoint",),
        "counts per rank are not in the table, nor are warm-ups and calibration: E20 adds them "
        "from the protocol (4 per cell, 1 per arm), so only the sum is shown to be consistent",
    ),
    (
        "the mean latency or the longest one of an arm",
        ("e2e_mean_ms",),
        "only TTFT, TPOT and ITL percentiles are given; they do not add up to a mean",
    ),
)

_ALL_TO_ALL_NEEDS = (
    (
        "a tail latency (p95, p99) or the spread between runs",
        ("p99_us", "repeat"),
        "one median per cell",
    ),
    (
        "GB/s of a library",
        ("wire_bytes", "hidden"),
        "hidden size, top-k, dtypes and deduplication are not columns",
    ),
    (
        "two libraries did the same work inside the timed region",
        ("timed_region",),
        "what is timed (quantising, layout, host sync) and which statistic over ranks is taken "
        "are not columns",
    ),
    (
        "why UCCL-EP did not complete at EP64",
        ("error",),
        "the cell says `crash` and nothing else",
    ),
)


def serving_limits(rows: Sequence[ServingRow]) -> list[NotDerivable]:
    """Sentences about the serving table that it cannot show."""
    counted = [
        NotDerivable(sentence, blank)
        for sentence, arm, column in _NEEDS_VALUES
        if (blank := _blanks(rows, arm, column))
    ]
    return counted + _lacking(_NEEDS_COLUMNS, ServingRow)


def all_to_all_limits(rows: Sequence[AllToAllRow]) -> list[NotDerivable]:
    """Sentences about the all-to-all table that it cannot show."""
    return _unmeasured(rows) + _confounded(rows) + _lacking(_ALL_TO_ALL_NEEDS, AllToAllRow)


def tokens_per_request(rows: Sequence[ServingRow]) -> dict[tuple[str, str], tuple[Decimal, ...]]:
    """Published tokens/s over requests/s, least and greatest over concurrency, by (shape, arm)."""
    means: dict[tuple[str, str], list[Decimal]] = {}
    for row in rows:
        if row.output_tok_per_s is not None and row.requests_per_s:
            mean = row.output_tok_per_s / row.requests_per_s
            means.setdefault((row.shape, row.arm), []).append(mean)
    return {key: (min(values), max(values)) for key, values in means.items()}


def falling(rows: Sequence[AllToAllRow]) -> list[tuple[AllToAllRow, AllToAllRow]]:
    """Neighbouring EP sizes of one column where the larger one is faster: (smaller, larger)."""
    series: dict[tuple[str, ...], list[AllToAllRow]] = {}
    for row in sorted(rows, key=lambda r: r.ep_size):
        if row.median_us is not None:
            key = (row.workload, row.phase, row.backend, row.transport, row.provenance)
            series.setdefault(key, []).append(row)
    pairs = [pair for values in series.values() for pair in pairwise(values)]
    return [(a, b) for a, b in pairs if (b.median_us or 0) < (a.median_us or 0)]


def _blanks(rows: Sequence[ServingRow], arm: str, column: str) -> str:
    cells = [row for row in rows if row.arm == arm]
    blank = sum(getattr(row, column) is None for row in cells)
    return f"{column} of {arm} is blank in {blank} of {len(cells)} cells" if blank else ""


def _lacking(
    entries: Sequence[tuple[str, tuple[str, ...], str]], kind: type[ServingRow] | type[AllToAllRow]
) -> list[NotDerivable]:
    present = {f.name for f in fields(kind)}
    return [NotDerivable(s, why) for s, columns, why in entries if not present & set(columns)]


def _unmeasured(rows: Sequence[AllToAllRow]) -> list[NotDerivable]:
    largest = max(row.ep_size for row in rows)
    columns = {(r.backend, r.transport, r.provenance) for r in rows}
    measured = {
        (r.backend, r.transport, r.provenance)
        for r in rows
        if r.ep_size == largest and r.status == "ok"
    }
    if measured == columns:
        return []
    reason = f"EP{largest} was measured in {len(measured)} of {len(columns)} columns"
    return [NotDerivable(f"which library is fastest at EP{largest}", reason)]


def _confounded(rows: Sequence[AllToAllRow]) -> list[NotDerivable]:
    """Comparisons of backends that no common transport or workload allows."""
    found = []
    seen = {(r.backend, r.transport) for r in rows}
    over = {b: {t for x, t in seen if x == b} for b, _ in seen}
    for a, b in combinations(sorted(over), 2):
        if not over[a] & over[b]:
            reason = f"{a} was run over {_words(over[a])}, {b} over {_words(over[b])}: library and "
            found.append(
                NotDerivable(f"{a} is faster or slower than {b}", reason + "fabric change together")
            )
    for backend in sorted({r.backend for r in rows}):
        loads = {r.workload for r in rows} - {r.workload for r in rows if r.backend == backend}
        for load in sorted(loads):
            sentence = f"how {backend} compares in {load}"
            found.append(NotDerivable(sentence, f"{backend} has no {load} rows"))
    return found


def _words(names: set[str]) -> str:
    return ", ".join(sorted(names))
