"""What the load generator is given and what it hands back: plain frozen records.

All times are CLOCK_MONOTONIC nanoseconds of the client's host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

ROLES = ("measured", "warmup", "calibration")
CANCELLED = "cancelled by the client"


@dataclass(frozen=True, slots=True)
class Request:
    """One request, its body built before the cell starts.

    Attributes:
        request_id: Unique within a sweep; sent as `x-request-id`.
        role: `measured`, `warmup` or `calibration`; sent as `x-ep-ray-role`.
        body: JSON of the call.
        max_tokens: Completion length that the body asks for.
        ignore_eos: Whether the body makes the server generate exactly `max_tokens`; a
            completion of another length is then a failed request.
        session: Sent as `x-session-id` where there is one.
        at_ms: When it arrived in the trace that it is from; None without one.
        cancel_after_tokens: The client gives it up once so many tokens have come; None never.
    """

    request_id: str
    role: str
    body: bytes
    max_tokens: int
    ignore_eos: bool = True
    session: str | None = None
    at_ms: float | None = None
    cancel_after_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"request {self.request_id}: role {self.role!r} is not one of {ROLES}")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of one request: a row of the `requests` table.

    Attributes:
        request_id: As asked.
        role: As asked.
        endpoint: Who answered: the response header `x-ep-ray-endpoint`, or else the target's
            name where there are several targets, or else None.
        state: `complete`, `failed` or `aborted` (by this client).
        reason: Why it is not complete, in words; empty when it is. `CANCELLED` where it was
            given up on purpose, which is no failure.
        http_status: None where no response head came.
        finish_reason: As the server gave it.
        prompt_tokens: As the server counted them.
        completion_tokens: Tokens generated, as far as was received.
        completion_tokens_source: `usage`, `token_ids` or `text_chunks`.
        token_rule: What decided which chunks carry tokens: `continuous_usage`, `token_ids`
            or `text`.
        intended_ns: When a place in the closed loop fell free for it, or its time in an open loop.
        sent_ns: Just before its first byte was written; None if it was never written.
        end_ns: Receive stamp of the end of the response, or the moment that it failed.
        chunk_ns: Receive stamps of the chunks that carry tokens.
        chunk_tokens: Tokens in each of those chunks.
    """

    request_id: str
    role: str
    endpoint: str | None
    state: str
    reason: str
    http_status: int | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    completion_tokens_source: str | None
    token_rule: str | None
    intended_ns: int
    sent_ns: int | None
    end_ns: int
    chunk_ns: tuple[int, ...]
    chunk_tokens: tuple[int, ...]

    @property
    def cancelled(self) -> bool:
        """Whether the client gave it up as the load asks."""
        return is_cancelled(self.state, self.reason)


def is_cancelled(state: str, reason: str) -> bool:
    """Whether a record says that its request was given up as the load asks."""
    return state == "aborted" and reason == CANCELLED


@dataclass(frozen=True, slots=True)
class CellRecord:
    """What became of one cell.

    Attributes:
        wall_ns: First measured request sent to last measured request ended; 0 if none was sent.
        first_sent_ns: When the first measured request was sent; None if none was.
        in_flight_max: Most measured requests in flight at once.
        client_lag_p99_ns: How late the client was, 99th percentile: its 5 ms heartbeat, and in an
            open loop its requests, from their time to their first byte; the later of the two.
        client_cpu_ns: CPU time that the client's thread used while the cell ran.
        replaced_connections: Kept-alive connections that the server had closed while idle and
            that were replaced before anything was sent on them.
        clock_offset_ns: `clock_offset_ns()` of the client's host, by which stamps of another host
            become comparable.
        stopped: Whether the cell was cut short by its stop event. Requests that had not been
            taken up by then have no record.
        requests: In the order in which they were taken up, all roles.
    """

    wall_ns: int
    first_sent_ns: int | None
    in_flight_max: int
    client_lag_p99_ns: int
    client_cpu_ns: int
    replaced_connections: int
    clock_offset_ns: int
    stopped: bool
    requests: list[RequestRecord]


def clock_offset_ns() -> int:
    """CLOCK_REALTIME less CLOCK_MONOTONIC of this host."""
    return time.time_ns() - time.monotonic_ns()
