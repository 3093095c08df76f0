"""Gets to know an OpenAI-compatible server that is already running, before load is sent."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass

from serving.load.client import run_cell
from serving.load.prompts import CallSpec, build_requests
from serving.load.target import API_PATHS, Target

_TIMEOUT_S = 60.0
_TOKENS = 2  # of the probe's prompt and of its completion
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class AttachError(RuntimeError):
    """The server cannot take the load; says what was asked and what it answered."""


@dataclass(frozen=True)
class AttachedServer:
    """What a running server is.

    Attributes:
        model: The model that requests name.
        token_prompts: Whether it takes prompts as token ids.
        strict: Whether it refuses fields beyond OpenAI's, so that lengths cannot be forced.
        version: As `/version` says, or empty.
    """

    model: str
    token_prompts: bool
    strict: bool
    version: str


def attach(url: str, api: str, model: str, vocab_size: int | None) -> AttachedServer:
    """Asks a server for its models and tries which requests of the load it takes.

    Args:
        url: Base URL, with or without `/v1`.
        api: `completions` or `chat`.
        model: Model to use; empty takes the only one that the server offers.
        vocab_size: Size of its vocabulary, so that token ids can be drawn; None if not known.

    Raises:
        AttachError: It does not answer, offers several models, or takes no request.
    """
    base = url.rstrip("/").removesuffix("/v1")
    name = _choose(_models(base), model, base)
    id_choices = (True, False) if vocab_size and api == "completions" else (False,)
    refusal = ""
    for strict in (False, True):
        for ids in id_choices:
            vocabulary = vocab_size if ids else None
            refusal = _try(base, CallSpec(name, api, _TOKENS, _TOKENS, vocabulary, strict=strict))
            if not refusal:
                return AttachedServer(name, ids, strict, _version(base))
    raise AttachError(
        f"{base}{API_PATHS[api]} takes no request for model `{name}`: {refusal}. "
        f"Choose another endpoint with load.api={'chat' if api == 'completions' else 'completions'}"
    )


def _models(base: str) -> list[str]:
    try:
        found = json.loads(_get(f"{base}/v1/models"))
        return [entry["id"] for entry in found["data"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AttachError(
            f"{base}/v1/models does not answer as an OpenAI-compatible server does: {error}. "
            "Start the server, or correct arm.url="
        ) from error


def _choose(offered: list[str], wanted: str, base: str) -> str:
    if wanted in offered:
        return wanted
    if not wanted and len(offered) == 1:
        return offered[0]
    asked = f"model.name={wanted}" if wanted else "no model.name"
    raise AttachError(
        f"asked: {asked}; found: {base} offers {', '.join(offered) or 'no model'}. "
        "Choose one with model.name="
    )


def _try(base: str, spec: CallSpec) -> str:
    """Sends one request as the load would; why it is not complete, or nothing."""
    requests = build_requests(spec, seed=0, trial_id="probe", measured=1)
    return run_cell(Target.parse(base, spec.api), requests, 1, _TIMEOUT_S).requests[0].reason


def _version(base: str) -> str:
    try:
        return str(json.loads(_get(f"{base}/version")).get("version", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _get(url: str) -> str:
    with _DIRECT.open(url, timeout=_TIMEOUT_S) as answer:
        return str(answer.read().decode())
