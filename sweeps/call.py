"""What the requests of a cell ask for, and the file that their prompts may be from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from ep_ray.config.schema import ArrivalKind, Config, PromptKind
from ep_ray.watchdog import TrialError
from serving.load.arrivals import trace_arrivals_ns
from serving.load.cancel import cancelled_places
from serving.load.file_drafts import conversation_drafts, fitting, trace_part
from serving.load.prompt_file import PromptFile, read_prompt_file
from serving.load.prompts import CallSpec
from serving.models import MODEL_CACHE, tokenizer_file
from sweeps.trial import ServingTrial, Trial


def call_spec(
    config: Config,
    trial: ServingTrial,
    model: str,
    vocab_size: int | None,
    strict: bool = False,
) -> CallSpec:
    """What every request of a cell asks for.

    Args:
        config: The experiment.
        trial: The cell.
        model: Name that the server knows.
        vocab_size: Ids of its vocabulary; None where it takes no token ids.
        strict: Whether it refuses fields beyond OpenAI's.

    Raises:
        TrialError: The file of the prompts has gone or has changed into none.
    """
    load = config.load
    try:
        file = prompt_file(config)
    except ValueError as error:
        raise TrialError("failed", str(error)) from error
    return CallSpec(
        model=model,
        api=load.api.name,
        prompt_tokens=trial.prompt_tokens,
        completion_tokens=trial.completion_tokens,
        vocab_size=vocab_size,
        temperature=load.temperature,
        ignore_eos=load.ignore_eos,
        sessions=load.sessions,
        strict=strict,
        prompts=load.prompts.name,
        shared_prefix_tokens=load.shared_prefix_tokens,
        file=file,
        draw=_draw(config, trial),
        max_model_len=config.model.max_model_len,
        cancel_share=load.cancel_share,
        cancel_after_tokens=load.cancel_after_tokens,
    )


def _draw(config: Config, trial: ServingTrial) -> str:
    """All arms of a cell and repeat send and cancel the same, for they are compared in pairs."""
    return f"{config.seed}/{trial.cell}/r{trial.repeat}"


def prompt_file(config: Config) -> PromptFile | None:
    """What `load.file` holds; None without one. Raises `ValueError` if it cannot be read."""
    load = config.load
    if load.file is None:
        return None
    path = Path(load.file)
    stamp = path.stat().st_mtime_ns if path.is_file() else 0
    talks = load.prompts is PromptKind.conversations
    tokenizer = tokenizer_file(config.model, MODEL_CACHE) if talks else None
    return _read(load.prompts.name, load.file, stamp, tokenizer)


@lru_cache(maxsize=1)  # they can be large, and every block asks
def _read(kind: str, path: str, _: int, tokenizer: str | None) -> PromptFile:
    return read_prompt_file(kind, path, tokenizer)


def prompt_problems(config: Config, trials: Sequence[Trial]) -> Iterator[str]:
    """Why the file of the prompts cannot be sent, in words."""
    cells = {(t.cell, t.repeat): t for t in trials if isinstance(t, ServingTrial)}
    try:
        file = prompt_file(config) if cells else None
        if file is not None:
            for trial in cells.values():
                lengths = _try(file, trial, config)
                load, key = config.load, f"{_draw(config, trial)}/cancelled"
                cancelled_places(lengths, load.cancel_share, load.cancel_after_tokens, key)
    except ValueError as error:
        yield str(error)


def _try(file: PromptFile, trial: ServingTrial, config: Config) -> list[int]:
    """Completion tokens that the cell's measured requests ask for."""
    asked, most_tokens = trial.completion_tokens, config.model.max_model_len
    if not file.trace:
        choices, roles = fitting(file, asked, most_tokens), ["measured"] * trial.requests
        drafts = conversation_drafts(choices, _draw(config, trial), roles, roles, asked)
        return [draft.completion_tokens for draft in drafts]
    part = trace_part(file, trial.requests, asked, most_tokens)
    if trial.arrival is ArrivalKind.trace and trial.rate_per_s is not None:
        try:
            trace_arrivals_ns([entry.at_ms for entry in part], trial.rate_per_s)
        except ValueError as error:
            raise ValueError(f"`load.file={file.path}` with load.arrival=trace: {error}") from error
    return [asked or entry.completion_tokens for entry in part]


def takes_prompts(config: Config, url: str, token_prompts: bool) -> Iterator[str]:
    """Why a running server cannot be sent the prompts, in words."""
    if config.load.prompts is PromptKind.trace and not token_prompts:
        known = "refuses them" if config.model.vocab_size else "has an unknown vocabulary"
        yield (
            f"asked: load.prompts=trace, which is token ids; found: {url} {known}. Give "
            "model.vocab_size of a server that takes prompts as token ids"
        )
