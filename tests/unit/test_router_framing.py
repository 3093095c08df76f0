"""HTTP framing, against a parser that is too simple to be wrong and sees all bytes at once."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serving.router.framing import (
    CHUNKED,
    MAX_CHUNK_LINE_BYTES,
    MAX_HEAD_BYTES,
    MORE,
    UNTIL_CLOSE,
    Chunked,
    Framing,
    FramingError,
    Length,
    UntilClose,
)
from serving.router.heads import parse_request, parse_response

REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n%b\r\n"
RESPONSE = b"HTTP/1.1 200 OK\r\nserver: a\r\n%b\r\n"


def naive_end(stream: bytes) -> int:
    """End of a chunked body in a whole stream, line by line; MORE when it has none."""
    pos = 0
    while True:
        line, found, _ = stream[pos:].partition(b"\r\n")
        if not found:
            return MORE
        size = int(line.split(b";")[0].strip(), 16)
        pos += len(line) + 2 + size
        if size:
            pos += 2
            continue
        while True:
            line, found, _ = stream[pos:].partition(b"\r\n")
            if not found:
                return MORE
            pos += len(line) + 2
            if not line:
                return pos


def fed(framing: Framing, stream: bytes, cuts: list[int]) -> int:
    """Feeds `stream` cut at `cuts`; the absolute end, or MORE."""
    edges = [0, *sorted({cut % (len(stream) + 1) for cut in cuts}), len(stream)]
    for start, stop in itertools.pairwise(edges):
        if start == stop:
            continue
        end = framing.feed(stream[start:stop])
        if end != MORE:
            return start + end
    return MORE


payloads = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.integers(1, 5000).map(lambda size: b"x" * size),
    st.sampled_from([b"\r\n0\r\n\r\n", b"0\r\n\r\n", b"\r\n", b"data: a\n\n", b"a\r\n0\r\n\r\n"]),
)
extensions = st.sampled_from([b"", b";a", b' ;a="b"', b";x=0"])
chunks = st.tuples(payloads, extensions, st.sampled_from([b"%x", b"%X", b"%04x"]))
trailers = st.sampled_from([b"", b"a: b\r\n", b"etag: 0\r\nx: \r\n"])
bodies = st.tuples(st.lists(chunks, max_size=8), trailers)


def encode(body: tuple[list[tuple[bytes, bytes, bytes]], bytes]) -> bytes:
    """The bytes of a chunked body."""
    lines = [
        form % len(data) + extension + b"\r\n" + data + b"\r\n" for data, extension, form in body[0]
    ]
    return b"".join(lines) + b"0\r\n" + body[1] + b"\r\n"


@given(bodies, st.binary(max_size=30), st.lists(st.integers(0, 40000), max_size=30))
def test_a_chunked_body_ends_where_it_ends(body, behind, cuts):
    stream = encode(body)
    assert naive_end(stream + behind) == len(stream)
    assert fed(Chunked(), stream + behind, cuts) == len(stream)


@given(bodies, st.integers(1, 20000), st.lists(st.integers(0, 40000), max_size=20))
def test_a_cut_off_chunked_body_has_no_end(body, missing, cuts):
    stream = encode(body)
    cut_off = stream[: max(0, len(stream) - missing)]
    assert naive_end(cut_off) == MORE
    assert fed(Chunked(), cut_off, cuts) == MORE


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 1000])
def test_every_split_of_a_token_stream(step):
    body = (
        [(b"x" * size, b"", b"%x") for size in (200, 15, 16, 255, 256, 4095, 4096, 1)],
        b"a: b\r\n",
    )
    stream = encode(body)
    assert fed(Chunked(), stream, list(range(0, len(stream), step))) == len(stream)


def test_a_payload_that_looks_like_the_end_at_the_end_of_a_read():
    payload = b"a" * 60 + b"\r\n0\r\n\r\n"
    body = Chunked()
    assert body.feed(b"%x\r\n" % len(payload) + payload) == MORE
    assert body.feed(b"\r\n0\r\n") == MORE
    assert body.feed(b"\r\n") == 2


@pytest.mark.parametrize(
    "stream",
    [
        b"zz\r\nabc",
        b"-5\r\n",
        b"+5\r\n",
        b"0x5\r\n",
        b"1_0\r\n",
        b"\r\n",
        b"d4\r\n" + b"x" * 0xD4 + b"xx20\r\n",
        b"20\n" + b"x" * 32,
        b"5\r\nabcdeXX",
        b"f" * 16 + b"\r\n",
        b"5;" + b"a" * MAX_CHUNK_LINE_BYTES,
    ],
)
@pytest.mark.parametrize("step", [1, 100000])
def test_broken_chunk_framing_is_refused(stream, step):
    with pytest.raises(FramingError, match="bad chunk framing"):
        fed(Chunked(), stream, list(range(0, len(stream), step)))


def test_endless_trailers_are_refused():
    body = Chunked()
    with pytest.raises(FramingError, match="bad chunk framing"):
        body.feed(b"0\r\n" + b"a: b\r\n" * (MAX_HEAD_BYTES // 5))


@given(st.integers(1, 100), st.lists(st.integers(0, 200), max_size=10), st.integers(0, 50))
@example(length=5, cuts=[5], behind=3)
def test_a_length_is_exact(length, cuts, behind):
    assert fed(Length(length), b"x" * (length + behind), cuts) == length
    assert fed(Length(length), b"x" * (length - 1), cuts) == MORE


def test_a_close_delimited_body_has_no_end_of_its_own():
    assert UntilClose().feed(b"0\r\n\r\n") == MORE


def test_request_head():
    head = parse_request(
        REQUEST % b"Content-Length:  12 \r\nX-EP-Ray-Role: warmup\r\nexpect: 100-Continue\r\n"
    )
    assert (head.method, head.target) == (b"POST", b"/v1/completions")
    assert head.length == 12
    assert (head.role, head.expects, head.keep_alive) == ("warmup", True, True)
    plain = parse_request(REQUEST % b"")
    assert (plain.length, plain.role, plain.expects) == (0, "measured", False)
    assert parse_request(REQUEST % b"transfer-encoding: chunked\r\n").length == CHUNKED
    assert parse_request(REQUEST % b"content-length: 0\r\n").length == 0
    assert not parse_request(REQUEST % b"connection: TE, Close\r\n").keep_alive
    assert not parse_request(b"GET / HTTP/1.0\r\n\r\n").keep_alive
    assert parse_request(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n").keep_alive


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        REQUEST % b"content-length : 5\r\n",
        REQUEST % b"a: b\r\n folded\r\n",
        REQUEST % b"content-length: 5\r\ncontent-length: 6\r\n",
        REQUEST % b"content-length: -1\r\n",
        REQUEST % b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        REQUEST % b"transfer-encoding: gzip\r\n",
        REQUEST % b"x-ep-ray-role: a b\r\n",
        REQUEST % b"x-ep-ray-role:\r\n",
    ],
)
def test_ambiguous_requests_are_refused(head):
    with pytest.raises(FramingError):
        parse_request(head)


@pytest.mark.parametrize(
    ("fields", "length", "keep_alive"),
    [
        (b"content-length: 5\r\n", 5, True),
        (b"content-length: 5\r\ncontent-length: 5\r\n", 5, True),
        (b"content-length: 0\r\n", 0, True),
        (b"Transfer-Encoding: Chunked\r\n", CHUNKED, True),
        (b"transfer-encoding: gzip, chunked\r\n", CHUNKED, True),
        (b"transfer-encoding: chunked\r\ncontent-length: 5\r\n", CHUNKED, False),
        (b"transfer-encoding: gzip\r\n", UNTIL_CLOSE, False),
        (b"", UNTIL_CLOSE, False),
        (b"content-length: 5\r\nconnection: close\r\n", 5, False),
    ],
)
def test_response_framing(fields, length, keep_alive):
    head = parse_response(RESPONSE % fields)
    assert head.status == 200
    assert head.length == length
    assert head.keep_alive is keep_alive
    assert parse_response(RESPONSE % fields, to_head_request=True).length == 0


@pytest.mark.parametrize("status", [100, 103, 204, 304])
def test_responses_without_a_body(status):
    head = b"HTTP/1.1 %d X\r\ncontent-length: 5\r\n\r\n" % status
    assert parse_response(head).length == 0


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data):
    for parse in (parse_request, parse_response):
        with contextlib.suppress(FramingError):
            parse(data + b"\r\n\r\n")
