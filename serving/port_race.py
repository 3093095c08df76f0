"""Whether a group's start-up failed because it lost a race for a port. Pure.

vLLM looks for free ports, closes them, tells the peers, and binds them later. Who takes one in
between makes the start-up fail in one of two ways: the rank that binds dies with "address already
in use", or it listens elsewhere and the others dial a port where nobody answers, until one of
them gives up or the deadline passes. Such a group comes up at the next try; a group with any
other fault does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serving.engine_process import RAISED

# An exception or uvicorn's error line. vLLM's notes that a port "is already in use, trying port"
# the next one, and torch's warnings about one address family, are no failures.
_TAKEN = re.compile(r"EADDRINUSE|\[Errno 98\]|Address already in use \(addr=", re.IGNORECASE)
_UVICORN = re.compile(r"^(?:\(.*?\) )?ERROR: +(\[Errno 98\] error while attempting to bind .+)$")
# What torch's store, gloo and vLLM's handshake say while, or after, a peer never came.
_WAITS = re.compile(
    r"client socket has timed out after \d+ ?ms while trying to connect to"
    r"|TCP client failed to connect/validate to host"
    r"|Timed out after \d+ seconds waiting for clients"
    r"|Did not receive response from front-end process within"
)
_LONGEST_LINE = 400


@dataclass(frozen=True)
class PortSigns:
    """What one rank's log of this start says about ports.

    Attributes:
        taken: First error that says that an address was in use; empty where there is none.
        waits: First line that says that a peer was not there; empty where there is none.
        cause: First error of any kind; empty where there is none.
    """

    taken: str = ""
    waits: str = ""
    cause: str = ""


@dataclass(frozen=True)
class RankAtStart:
    """A rank of a group that did not come up.

    Attributes:
        name: The rank's name.
        exit_code: Of its server; None while that runs.
        healthy: Whether its `/health` answered with 200.
        signs: What its log says.
    """

    name: str
    exit_code: int | None
    healthy: bool
    signs: PortSigns


def port_signs(lines: Iterable[str]) -> PortSigns:
    """Reads one rank's log; `lines` must begin where this start began."""
    taken = waits = cause = ""
    for line in map(str.rstrip, lines):
        raised = RAISED.match(line) or _UVICORN.match(line)
        error = raised[1][:_LONGEST_LINE] if raised else ""
        cause = cause or error
        if not taken and _TAKEN.search(error):
            taken = error
        if not waits and _WAITS.search(line):
            waits = (error or line)[:_LONGEST_LINE]
    return PortSigns(taken, waits, cause)


def lost_port_race(ranks: Sequence[RankAtStart], linked: bool) -> str | None:
    """Why the start-up of these ranks lost a race for a port, in words; None if it did not.

    A rank that died of anything else is the reason, whatever its peers say: they lost it.

    Args:
        ranks: All ranks of the group, in rank order.
        linked: Whether they find each other over the network, as data-parallel ranks do.
    """
    for rank in ranks:
        if rank.signs.taken and rank.signs.taken == rank.signs.cause:
            return f"{rank.name} found its port taken: {rank.signs.taken}"
    dead = [rank for rank in ranks if rank.exit_code is not None]
    if not linked or any(not _WAITS.search(rank.signs.cause) for rank in dead):
        return None
    for rank in ranks:
        if rank.signs.waits:
            return f"{rank.name} waited for a peer in vain: {rank.signs.waits}"
    return None if dead else _some_up_some_not(ranks)


def _some_up_some_not(ranks: Sequence[RankAtStart]) -> str | None:
    """At the deadline: ranks of one group come up together, or one did not find the others."""
    up = [rank.name for rank in ranks if rank.healthy]
    late = [rank.name for rank in ranks if not rank.healthy]
    if up and late and not any(rank.signs.cause for rank in ranks):
        return f"at the deadline {', '.join(up)} answered and {', '.join(late)} still waited"
    return None
