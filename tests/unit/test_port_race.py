"""Which failed start-ups lost a race for a port: lines as vLLM, torch and zmq log them."""

from __future__ import annotations

import asyncio
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from serving.engine_process import first_error, lines_from
from serving.port_race import PortSigns, RankAtStart, lost_port_race, port_signs

CORE = "(EngineCore_DP0 pid=71) ERROR 12-06 12:18:05 [core.py:1210] "
WORKER = "(Worker pid=72) ERROR 12-06 12:18:04 [multiproc_executor.py:852] "
TORCH_TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
    "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, "
    "message: address already in use"
)
ZMQ_TAKEN = "zmq.error.ZMQError: Address already in use (addr='tcp://10.0.0.1:19503')"
OS_TAKEN = "OSError: [Errno 98] Address already in use"
UVICORN_TAKEN = (
    "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8001): "
    "address already in use"
)
CORE_FAILED = "RuntimeError: Engine core initialization failed. See root cause above."
DIAL = (
    "The client socket has timed out after 300000ms while trying to connect to (10.0.0.1, 19503)."
)
TORCH_WAITS = f"torch.distributed.DistNetworkError: {DIAL}"
STORE_WAITS = (
    "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. "
    "1/2 clients joined."
)
VLLM_WAITS = "RuntimeError: Did not receive response from front-end process within 5 minutes"
TORCH_DIALS = f"[E1206 12:15:30.071331387 socket.cpp:1028] [c10d] {DIAL}"
TORCH_REACHED_A_STRANGER = (
    "[W1206 12:37:29.785301160 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to "
    "host 127.0.0.1:24633 - retrying (try=0, timeout=1800000ms, delay=284ms): Connection reset by "
    "peer"
)
NO_FAULT = (
    "(APIServer pid=7) INFO 12-06 12:20:30 [network_utils.py:231] Port 19502 is already in use, "
    "trying port 19503",
    "(EngineCore pid=71) WARNING 12-06 12:20:31 [parallel.py:697] Address already in use. "
    "Retrying with a new port.",
    "[W1206 12:15:30.1 socket.cpp:752] [c10d] The server socket has failed to bind to [::]:29500 "
    "(errno: 98 - Address already in use).",
    "(APIServer pid=7) WARNING 12-06 12:17:43 [system_utils.py:299] Found ulimit of 20000; this "
    "can cause fd limit errors like `OSError: [Errno 24] Too many open files`.",
    "INFO:     Application startup complete.",
)


def rank(number: int, *lines: str, code: int | None = None, healthy: bool = False) -> RankAtStart:
    return RankAtStart(f"rank{number}", code, healthy, port_signs(lines))


@pytest.mark.parametrize("said", [TORCH_TAKEN, ZMQ_TAKEN, OS_TAKEN])
@pytest.mark.parametrize("prefix", ["", CORE, WORKER])
def test_taken_port_is_a_lost_race_whatever_follows(said: str, prefix: str) -> None:
    lines = [*NO_FAULT, prefix + said, CORE_FAILED]
    dead, waiting = rank(0, *lines, code=1), rank(1, *NO_FAULT)
    expected = f"rank0 found its port taken: {said}"
    assert lost_port_race([dead, waiting], linked=True) == expected
    assert lost_port_race([dead], linked=False) == expected


def test_uvicorn_names_a_taken_port_without_an_exception() -> None:
    line = f"(APIServer pid=7) {UVICORN_TAKEN}"
    found = lost_port_race([rank(0, line, code=1)], linked=False)
    assert found is not None
    assert "('127.0.0.1', 8001)" in found


def test_taken_port_is_the_reason_of_peers_that_die_first() -> None:
    """A server takes seconds to leave after its engine core; its peers may be quicker."""
    peer = rank(1, f"{CORE}RuntimeError: Connection closed by peer [10.0.0.1]:19503", code=1)
    found = lost_port_race([rank(0, CORE + TORCH_TAKEN), peer], linked=True)
    assert found == f"rank0 found its port taken: {TORCH_TAKEN}"


@pytest.mark.parametrize("said", [TORCH_WAITS, STORE_WAITS, VLLM_WAITS])
def test_rank_that_gave_up_on_a_peer_lost_a_race(said: str) -> None:
    ranks = [rank(0, *NO_FAULT), rank(1, *NO_FAULT, CORE + said, CORE_FAILED, code=1)]
    expected = f"rank1 waited for a peer in vain: {said}"
    assert lost_port_race(ranks, linked=True) == expected
    assert lost_port_race(ranks, linked=False) is None


@pytest.mark.parametrize("said", [TORCH_DIALS, TORCH_REACHED_A_STRANGER])
def test_rank_that_still_dials_at_the_deadline_lost_a_race(said: str) -> None:
    ranks = [rank(0, *NO_FAULT), rank(1, *NO_FAULT, said)]
    assert lost_port_race(ranks, linked=True) == f"rank1 waited for a peer in vain: {said}"


def test_ranks_apart_at_the_deadline_lost_a_race_only_where_they_are_linked() -> None:
    ranks = [rank(0, *NO_FAULT, healthy=True), rank(1, *NO_FAULT)]
    expected = "at the deadline rank0 answered and rank1 still waited"
    assert lost_port_race(ranks, linked=True) == expected
    assert lost_port_race(ranks, linked=False) is None


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([rank(0), rank(1)], id="all silent"),
        pytest.param([rank(0, healthy=True), rank(1, healthy=True)], id="no token, all healthy"),
        pytest.param([rank(0, *NO_FAULT), rank(1, *NO_FAULT)], id="notes of ports found busy"),
        pytest.param([rank(0, code=137), rank(1, TORCH_DIALS)], id="killed, its peer dials"),
        pytest.param([rank(0, healthy=True), rank(1, code=2)], id="refused a flag"),
        pytest.param(
            [rank(0, CORE + "torch.OutOfMemoryError: CUDA out of memory.", code=1),
             rank(1, CORE + TORCH_WAITS, code=1)], id="out of memory, its peer gave up",
        ),
        pytest.param(
            [rank(0, healthy=True), rank(1, CORE + "ValueError: no such layer")], id="an error",
        ),
        pytest.param(
            [rank(0, CORE + "ValueError: no such layer", CORE + OS_TAKEN, code=1)],
            id="a port taken after the cause",
        ),
    ],
)  # fmt: skip
def test_other_failures_are_no_races(ranks: list[RankAtStart]) -> None:
    assert lost_port_race(ranks, linked=True) is None


def listen_again(port: int) -> None:
    socket.socket().bind(("127.0.0.1", port))


def serve_again(port: int) -> None:
    async def serve() -> None:
        await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port)

    asyncio.run(serve())


def store_again(port: int) -> None:
    distributed = pytest.importorskip("torch.distributed")
    distributed.TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=30))


def zmq_again(port: int) -> None:
    zmq = pytest.importorskip("zmq")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize("bind", [listen_again, serve_again, store_again, zmq_again])
def test_real_binders_on_a_real_taken_port_are_recognised(bind: Callable[[int], None]) -> None:
    """What this machine's Python, torch and zmq say, not what they once said."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(Exception, match=r"(?i)address already in use") as caught:
            bind(taken.getsockname()[1])
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert lost_port_race([rank(0, *lines, code=1)], linked=False) is not None


def test_store_that_nobody_joins_is_recognised() -> None:
    distributed = pytest.importorskip("torch.distributed")
    with pytest.raises(RuntimeError) as caught:
        distributed.TCPStore("127.0.0.1", 0, 2, True, timeout=timedelta(seconds=1))
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert port_signs(lines).waits


def test_lines_of_an_earlier_start_do_not_count(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(f"{OS_TAKEN}\n")
    begin = log.stat().st_size
    with log.open("a") as file:
        file.write("ValueError: é is no layer\n")
    assert first_error(log) == OS_TAKEN
    assert first_error(log, begin) == "ValueError: é is no layer"
    assert port_signs(lines_from(log, begin)) == PortSigns(cause="ValueError: é is no layer")
    assert list(lines_from(tmp_path / "none.log", 0)) == []
