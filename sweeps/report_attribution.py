"""The attribution of a sweep with `isolate`: what the router and the expert collective take."""

from __future__ import annotations

from sweeps.attribution import (
    ADDED,
    CollectiveShare,
    RouterShare,
    collective_shares,
    router_shares,
)
from sweeps.stats import Difference
from sweeps.tablefmt import Block, Section, Table, text_table
from sweeps.view import View

_HEADINGS = {"ttft_p50_ms": "TTFT p50", "ttft_p99_ms": "TTFT p99", "tpot_p50_ms": "TPOT p50"}


def sections(view: View) -> list[Section]:
    """What was isolated; nothing where nothing was."""
    routers, collectives = list(router_shares(view)), list(collective_shares(view))
    blocks: list[Block] = []
    if routers:
        blocks += [_about_routers(routers), _routers(routers)]
    if collectives:
        blocks += [_about_collectives(), _collectives(collectives)]
    return [Section("Attribution", tuple(blocks))] if blocks else []


def _about_routers(found: list[RouterShare]) -> str:
    text = (
        "What the router adds, in ms: the arm behind it less the same engines without it (the "
        "client goes round the ranks), taking turns cell by cell; and the same of null engines, "
        "which answer at a fixed pace (50 ms to the first token, 10 ms for each next one)."
    )
    repeats = {d.repeats for share in found for d in share.added.values() if d is not None}
    if not repeats or max(repeats) == 1:
        return f"{text} One run: no difference is shown to be real."
    return f"{text} Medians over paired repeats; in brackets the bootstrap 95 % interval."


def _routers(found: list[RouterShare]) -> Table:
    groups = (("engines", "added"), ("null engines", "added_to_null"))
    columns = [f"{group}\n{_HEADINGS[metric]}" for group, _ in groups for metric in ADDED]
    body = [
        (
            f"{share.cell.shape} {share.cell.load}",
            share.arm,
            share.policy,
            *[_text(getattr(share, field)[metric]) for _, field in groups for metric in ADDED],
        )
        for share in found
    ]
    return text_table("The router alone", ("cell", "arm", "router", *columns), body)


def _text(added: Difference | None) -> str:
    if added is None:
        return ""
    if added.low is None or added.high is None:
        return f"{added.value:+.3f}"
    return f"{added.value:+.3f} ({added.low:+.3f} to {added.high:+.3f})"


def _about_collectives() -> str:
    return (
        "The arms' expert collective by itself: dispatch and combine over the same transport with "
        "the tokens of one full step, on each data-parallel rank one token per running sequence "
        "(decode) or one whole prompt (prefill), times the model's MoE layers. `of` is that over "
        "the cell's TPOT p50 or TTFT p50. Uniform routing, nothing else on the machine: what the "
        "arm's steps really held (prefills among decodes, idle ranks) is not known to it."
    )


def _collectives(found: list[CollectiveShare]) -> Table:
    columns = ("cell", "arm", "step", "tokens", "collective", "launch", "pair µs", "MoE layers",
               "ms a step", "of")  # fmt: skip
    body = [
        (
            f"{share.cell.shape} {share.cell.load}",
            share.arm,
            share.phase,
            share.tokens,
            share.backend,
            share.launch,
            f"{share.pair_us:.1f}",
            share.layers,
            None if share.step_ms is None else f"{share.step_ms:.3f}",
            _of(share),
        )
        for share in found
    ]
    return text_table("The collective alone", columns, body)


def _of(share: CollectiveShare) -> str:
    what = "TPOT" if share.phase == "decode" else "TTFT"
    return "" if share.share is None else f"{100 * share.share:.0f} % of {what}"
