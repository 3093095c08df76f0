"""Framing of HTTP/1.1 responses: any split of the bytes gives the same response."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.load.http1 import HttpError, ResponseParser

BODY = 'data: {"t": "é🙂\r\n0\r\n\r\n"}\n\n'.encode()
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX-A: 1\r\nx-a:2 \r\n\r\n%s" % (len(BODY), BODY)
CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nX-A: 1\r\nx-a:2 \r\n\r\n"
    b'5;ext="a;b"\r\n%s\r\n0A  \r\n%s\r\n%x\r\n%s\r\n000\r\nTrailer: a\r\nb: c\r\n\r\n'
    % (BODY[:5], BODY[5:15], len(BODY) - 15, BODY[15:])
)
UNTIL_CLOSE = b"HTTP/1.1 200\r\nX-A: 1\r\nx-a:2 \r\n\r\n" + BODY
NO_BODY = b"HTTP/1.1 204 No Content\r\nX-A: 1\r\nx-a: 2\r\n\r\n"


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def parse(pieces: list[bytes]) -> tuple[ResponseParser, list[bool]]:
    parser = ResponseParser()
    return parser, [parser.feed(piece) for piece in pieces if piece]


@pytest.mark.parametrize("data", [LENGTH, CHUNKED, NO_BODY], ids=["length", "chunked", "none"])
@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=60))
def test_any_split_gives_the_same_response(data, cuts):
    parser, ends = parse(pieces_of(data, cuts))
    assert ends == [False] * (len(ends) - 1) + [True]
    assert b"".join(parser.body) == (b"" if data is NO_BODY else BODY)
    assert parser.body_bytes == sum(map(len, parser.body))
    assert parser.headers["x-a"] == "1, 2"
    assert (parser.keep_alive, parser.excess) == (True, False)


@pytest.mark.parametrize("data", [LENGTH, CHUNKED], ids=["length", "chunked"])
def test_single_bytes_hand_the_body_over_as_it_comes(data):
    parser = ResponseParser()
    begins = data.index(BODY[:5])
    for i in range(len(data)):
        parser.feed(data[i : i + 1])
        if begins <= i < begins + 5:
            assert parser.body_bytes == i - begins + 1
    assert b"".join(parser.body) == BODY


def test_one_response_in_whole_chunks_keeps_them_apart():
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    parser, ends = parse([head + b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"])
    assert (parser.body, ends) == ([b"ab", b"cde"], [True])


def test_a_body_until_close_ends_with_the_connection_only():
    parser, ends = parse(pieces_of(UNTIL_CLOSE, [9, 40]))
    assert not any(ends)
    assert parser.feed_eof()
    assert (b"".join(parser.body), parser.status, parser.keep_alive) == (BODY, 200, False)


@pytest.mark.parametrize("data", [LENGTH, CHUNKED], ids=["length", "chunked"])
def test_a_connection_closed_before_the_end_never_ends_the_response(data):
    for cut in range(len(data)):
        parser, ends = parse([data[:cut]])
        assert not any(ends)
        assert not parser.feed_eof()


@pytest.mark.parametrize(
    ("head", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0, 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nConnection: Foo, Close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\nconnection: keep-alive\r\n\r\n", True),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            False,
        ),
    ],
)
def test_keep_alive_rules(head, keep_alive):
    parser, ends = parse([head])
    assert (parser.keep_alive, ends) == (keep_alive, [True])


def test_bytes_after_the_end_are_noticed():
    parser, _ = parse([LENGTH + b"H"])
    assert parser.excess
    parser, _ = parse([LENGTH])
    assert not parser.excess
    assert parser.feed(b"H")
    assert parser.excess


MALFORMED = [
    b"ICY 200 OK\r\n\r\n",
    b"HTTP/2 200\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    b"HTTP/1.1 200 OK\r\na b : c\r\n : d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 1, 2\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
    *(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body
        for body in (
            b"\r\n",
            b"0x2\r\nab\r\n",
            b"+2\r\nab\r\n",
            b"1_0\r\n",
            b" 2\r\nab\r\n",
            b"-2\r\n",
            b"2\r\nabc\r\n0\r\n\r\n",
            b"2\r\nab0\r\n\r\n",
            b"2\r\nab\n\n0\r\n\r\n",
            b"1" * 20 + b"\r\n",
            b"1;" + b"x" * 10_000,
            b"0\r\n" + b"x" * 10_000,
        )
    ),
]


@pytest.mark.parametrize("data", MALFORMED, ids=range(len(MALFORMED)))
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 200_000), max_size=3))
def test_broken_framing_is_an_error_and_never_a_response(data, cuts):
    with pytest.raises(HttpError):
        parse(pieces_of(data, cuts))
