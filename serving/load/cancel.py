"""Requests that the client gives up on purpose: which ones, and when one has had enough."""

from __future__ import annotations

from collections.abc import Sequence

from serving.load.decode import Stream, read_stream, token_chunks
from serving.load.http1 import ResponseParser
from serving.load.seeded import generator
from serving.load.sse import split_events


def cancelled_places(
    lengths: Sequence[int], share: float, after_tokens: int, key: str
) -> frozenset[int]:
    """Which measured requests of a cell are cancelled; the same wherever the key is the same.

    Args:
        lengths: Completion tokens that each of them asks for, shape [requests].
        share: Of them, 0 to 1; rounded to whole requests, and not to none where it is above 0.
        after_tokens: Tokens after which a request is cancelled: shorter ones are never chosen.
        key: Names the draw.

    Returns:
        Places in `lengths`.

    Raises:
        ValueError: Too few are long enough.
    """
    wanted = max(1, round(share * len(lengths))) if share and lengths else 0
    long_enough = [place for place, length in enumerate(lengths) if length > after_tokens]
    if wanted > len(long_enough):
        raise ValueError(
            f"`load.cancel_share={share:g}` is {wanted} of {len(lengths)} requests, and "
            f"{len(long_enough)} of them ask for more than load.cancel_after_tokens="
            f"{after_tokens}: lower one of the two, or ask for longer completions"
        )
    chosen = generator(key).permutation(len(long_enough))[:wanted]
    return frozenset(long_enough[place] for place in chosen)


class Enough:
    """Counts the tokens of one response while it comes in, by the rule of its record.

    Other requests are decoded after the cell; this costs a client some microseconds for each
    event, of the cancelled requests alone.

    Args:
        tokens: When it is enough.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._stream = Stream()
        self._tail = b""  # of an event that is not whole yet
        self._pieces = 0  # of the body that were looked at

    def __call__(self, response: ResponseParser) -> bool:
        """Whether the body holds so many tokens by now."""
        if response.status != 200:
            return False
        unread = b"".join([self._tail, *response.body[self._pieces :]])
        self._pieces = len(response.body)
        events = list(split_events(unread))
        self._tail = unread[events[-1].end :] if events else unread
        read_stream(events, self._stream)
        _, carried = token_chunks(self._stream.chunks)
        return sum(count for _, count in carried) >= self._tokens
