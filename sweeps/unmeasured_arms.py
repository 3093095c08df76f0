"""What a comparison of arms cannot tell apart, each with the fact that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from sweeps.arm_facts import NO_ROUTER, ArmFacts, arm_facts
from sweeps.results import labels
from sweeps.unmeasured import Unmeasured
from sweeps.view import View

Arms = Mapping[str, ArmFacts]
# What may differ between two arms: its name, and how it is said of one (empty: it has none).
_DIFFERENCES: tuple[tuple[str, Callable[[ArmFacts], str]], ...] = (
    ("layout", lambda arm: arm.layout),
    ("transport", lambda arm: arm.transport),
    ("router", lambda arm: arm.router or ""),
    ("batch", lambda arm: str(arm.batch or "")),
    ("all2all backend", lambda arm: arm.all2all),
    ("engine settings", lambda arm: arm.engine or "as by default"),
)


def between_arms(view: View) -> Iterator[Unmeasured]:
    """Changes that came together, batches that were not equal, and routers without a twin."""
    found = view.of("serving")
    arms = arm_facts(found)
    order = [label for label in labels(found) if label in arms]
    for other in order[1:]:
        yield from _together(arms, order[0], other)
    yield from _batches(view, arms)
    yield from _routers(arms)
    if len(labels(found)) == 1:
        only = labels(found)[0]
        yield Unmeasured("any difference between arms", f"{only} is the only one")


def _together(arms: Arms, first: str, other: str) -> Iterator[Unmeasured]:
    """Two arms that differ in more than one respect."""
    sides = [
        (name, f"{name}: {of(arms[first])} / {of(arms[other])}")
        for name, of in _DIFFERENCES
        if of(arms[first]) and of(arms[other]) and of(arms[first]) != of(arms[other])
    ]
    if len(sides) > 1:
        names = [name for name, _ in sides]
        listed = f"{', '.join(names[:-1])} or {names[-1]}"
        what = f"whether {listed} makes the difference between {first} and {other}"
        yield Unmeasured(what, f"changed together: {'; '.join(words for _, words in sides)}")


def _batches(view: View, arms: Arms) -> Iterator[Unmeasured]:
    """Arms that admit fewer requests than another, in cells above that, without an equal twin."""
    most = max((trial.concurrency or 0 for trial in view.of("serving")), default=0)
    largest = max((arm.batch or 0 for arm in arms.values()), default=0)
    for label, arm in arms.items():
        if arm.batch is None or not arm.batch < min(most, largest):
            continue
        wider = replace(arm, batch=largest)
        if wider in arms.values():
            continue
        fact = (
            f"it admits {arm.batch} requests at once, another arm {largest}, and c goes up to "
            f"{most}; no arm of its layout admits {largest}"
        )
        yield Unmeasured(f"{label} with an equal batch above c = {arm.batch}", fact)


def _routers(arms: Arms) -> Iterator[Unmeasured]:
    """Routers whose arm has no twin without one."""
    alone = [
        (label, arm.router)
        for label, arm in arms.items()
        if arm.router not in (None, NO_ROUTER)
        and replace(arm, router=NO_ROUTER) not in arms.values()
    ]
    if alone:
        fact = ", ".join(f"{label} ({router})" for label, router in alone)
        yield Unmeasured("what the router costs", f"no arm with router none is the twin of {fact}")
