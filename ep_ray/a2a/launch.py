"""A backend's operations as calls without arguments: eager, or replayed from CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ep_ray.a2a.routing import Routing
from ep_ray.backends.base import Backend, Spec, Tokens

Call = Callable[[], object]
CAPTURED = ("dispatch", "combine", "pair")


class Launch:
    """Runs operations call by call.

    Operations are `dispatch`, `combine`, `pair`, their parts `dispatch_send`, `dispatch_recv`,
    `combine_send`, `combine_recv`, and with `work` between send and receive `pair_overlapped`
    and the `work` of a pair alone.

    Args:
        backend: Set up.
        tokens: What every dispatch sends, `[T, H]` on the device.
        work: What a rank does between send and receive, or None.
    """

    def __init__(self, backend: Backend, tokens: Tokens, work: Call | None = None) -> None:
        self._backend = backend
        self._tokens = tokens
        send = partial(backend.dispatch_send, tokens)
        dispatch: list[Call] = [send, backend.dispatch_recv]
        combine: list[Call] = [backend.combine_send, backend.combine_recv]
        self._parts: dict[str, Sequence[Call]] = {
            "dispatch": dispatch,
            "combine": combine,
            "pair": dispatch + combine,
            "dispatch_send": dispatch[:1],
            "dispatch_recv": dispatch[1:],
            "combine_send": combine[:1],
            "combine_recv": combine[1:],
        }
        if work is not None:
            hidden = [dispatch[0], work, dispatch[1], combine[0], work, combine[1]]
            self._parts |= {"pair_overlapped": hidden, "work": [work, work]}

    @property
    def overlaps(self) -> bool:
        """Whether there is work between send and receive."""
        return "pair_overlapped" in self._parts

    def load(self, routing: Routing, tokens: Tokens | None = None) -> None:
        """Takes the next routing, and other tokens of the same shape where given."""
        if tokens is not None:
            self._tokens.rows.copy_(tokens.rows)
            if self._tokens.scales is not None and tokens.scales is not None:
                self._tokens.scales.copy_(tokens.scales)
        self._backend.plan(routing.topk_idx, routing.weights)

    def call(self, op: str) -> Call:
        """The operation `op`; what it returns is what its last part returns."""
        parts = self._parts[op]
        return parts[0] if len(parts) == 1 else partial(_in_turn, parts)

    def combined(self) -> torch.Tensor:
        """Runs `combine` and returns `[T, H]`."""
        out = self.call("combine")()
        assert isinstance(out, torch.Tensor)
        return out

    def close(self) -> None:
        """Releases what was captured. Not collective."""


def _in_turn(parts: Sequence[Call]) -> object:
    for part in parts[:-1]:
        part()
    return parts[-1]()


class GraphLaunch(Launch):
    """Replays operations captured once, on the buffers that `load` fills.

    An adapter keeps what its library returned at the last call. A replay calls nothing, so `call`
    gives the adapter back what it had kept when the operation was captured: `received` then reads
    the memory that this graph writes.

    Collective over `group`: all ranks capture in the same order. The graphs hold on to the
    communicator: `close` before it is destroyed, which would wait for them for ever.
    """

    def __init__(
        self,
        backend: Backend,
        tokens: Tokens,
        routing: Routing,
        group: ProcessGroup,
        work: Call | None = None,
    ) -> None:
        super().__init__(backend, tokens, work)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._returned: dict[str, object] = {}
        self._kept: dict[str, dict[str, object]] = {}
        self.load(routing)
        wanted = [op for op in (*CAPTURED, "pair_overlapped", "work") if op in self._parts]
        for _ in range(2):
            # Connections and workspaces come into being at a first call, never inside a graph.
            for op in wanted:
                super().call(op)()
        torch.cuda.synchronize()
        dist.barrier(group)
        for op in wanted:
            self._capture(op, super().call(op))
        self._restore("dispatch")

    def _capture(self, op: str, operation: Call) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process (the communicator's watchdog) may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._returned[op] = operation()
        self._graphs[op] = graph
        self._kept[op] = dict(vars(self._backend))

    def _restore(self, op: str) -> None:
        vars(self._backend).update(self._kept[op])

    def call(self, op: str) -> Call:
        self._restore(op)
        return partial(self._replay, op)

    def _replay(self, op: str) -> object:
        self._graphs[op].replay()
        return self._returned[op]

    def close(self) -> None:
        torch.cuda.synchronize()
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._returned.clear()
        self._kept.clear()


def make_launch(
    spec: Spec,
    backend: Backend,
    tokens: Tokens,
    routing: Routing,
    group: ProcessGroup,
    work: Call | None = None,
) -> Launch:
    """The launch that `spec.graph` asks for; collective with graphs."""
    if spec.graph:
        return GraphLaunch(backend, tokens, routing, group, work)
    return Launch(backend, tokens, work)
