"""Event streams: line ends, comments, several data lines, byte order mark."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.load.sse import split_events


def data_of(body: bytes) -> list[bytes]:
    return [event.data for event in split_events(body)]


line = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)


@st.composite
def streams(draw):
    """A stream as bytes, and the data of its events."""
    body = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    expected = []
    # One kind of line end per stream: a CR and an LF of different lines would make one CRLF.
    eol = draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    for lines in draw(st.lists(st.lists(line, min_size=1, max_size=3), max_size=6)):
        for text in lines:
            body += draw(st.sampled_from([b"", b": note" + eol, b"id: 7" + eol, b":" + eol]))
            gap = b" " if text.startswith(" ") else draw(st.sampled_from([b"", b" "]))
            body += b"data:" + gap + text.encode() + eol
        body += eol * draw(st.integers(1, 3))
        expected.append("\n".join(lines).encode())
    return body, expected


@settings(deadline=None)
@given(streams())
def test_every_way_to_write_a_stream_gives_its_events(stream):
    body, expected = stream
    assert data_of(body) == expected


@settings(deadline=None)
@given(streams(), st.integers(0, 1000))
def test_an_event_is_there_exactly_once_its_empty_line_is(stream, cut):
    body, expected = stream
    whole = list(split_events(body))
    head = body[: cut % (len(body) + 1)]
    if head.endswith(b"\r"):
        return  # whether an LF follows is not known yet
    assert data_of(head) == [event.data for event in whole if event.end <= len(head)]
    assert [event.data for event in whole] == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"data: a\n\ndata: b\n", [b"a"]),
        (b"data\n\n", [b""]),
        (b"data:  a\n\n", [b" a"]),
        (b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"]),
        (b"data: a\r\r\n", [b"a"]),
        (b"\n\n\n", []),
        (b": ping\n\n: ping\n\ndata: a\n\n", [b"a"]),
        (b"Data: a\n\ndatax: b\n\n", []),
        (b"data: a\nevent: e\ndata: b\n\n", [b"a\nb"]),
        (b"data: \xe2\x80\xa8\n\n", [b"\xe2\x80\xa8"]),
    ],
)
def test_examples(body, expected):
    assert data_of(body) == expected


def test_names_and_ends():
    first, second = split_events(b"event: error\ndata: a\n\ndata: b\n\n")
    assert (first.name, first.end) == (b"error", 22)
    assert (second.name, second.end) == (b"", 31)
