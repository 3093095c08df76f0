"""Whether a load can be sent at all: checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ep_ray.config.check_workload import twice
from ep_ray.config.schema import Config


def check_load(config: Config) -> Iterator[str]:
    """What is wrong with `load`, in words."""
    load = config.load
    for shape in load.shapes:
        if not re.fullmatch(r"[1-9]\d*/[1-9]\d*", shape):
            yield f"`load.shapes={shape}`: write PROMPT/COMPLETION in tokens, for example 1024/256"
        elif sum(map(int, shape.split("/"))) > config.model.max_model_len:
            yield (
                f"`load.shapes={shape}` is longer than model.max_model_len="
                f"{config.model.max_model_len}"
            )
    if not load.shapes or not load.concurrency:
        yield "`load.shapes` and `load.concurrency` name at least one value each"
    yield from twice("load.shapes", load.shapes)
    yield from twice("load.concurrency", load.concurrency)
    for c in load.concurrency:
        if c < 1:
            yield f"`load.concurrency={c}`: at least 1"
    if load.min_requests < 1 or load.requests_per_slot < 1:
        yield "`load.min_requests` and `load.requests_per_slot` are at least 1"
    if load.sessions < 0:
        yield f"`load.sessions={load.sessions}`: at least 0"
