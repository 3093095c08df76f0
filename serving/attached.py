"""Gets to know an OpenAI-compatible server that is already running, before load is sent."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from serving.load.target import API_PATHS

_TIMEOUT_S = 60.0
_PROBE_TOKENS = 2
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


def attach(url: str, api: str, model: str, token_prompts: bool) -> AttachedServer:
    """Asks a server for its models and tries which requests it takes.

    Args:
        url: Base URL, with or without `/v1`.
        api: `completions` or `chat`.
        model: Model to use; empty takes the only one that the server offers.
        token_prompts: Whether the vocabulary's size is known, so that ids can be drawn.

    Raises:
        AttachError: It does not answer, offers several models, or takes no request.
    """
    base = url.rstrip("/").removesuffix("/v1")
    name = _choose(_models(base), model, base)
    wishes = [(ids, strict) for strict in (False, True) for ids in {token_prompts, False}]
    refusals = []
    for ids, strict in sorted(wishes, key=lambda wish: (wish[1], not wish[0])):
        refusal = _try(base, api, name, ids, strict)
        if refusal is None:
            return AttachedServer(name, ids, strict, _version(base))
        refusals.append(refusal)
    raise AttachError(
        f"{base}{API_PATHS[api]} takes no request for model `{name}`: {refusals[-1]}. "
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


def _try(base: str, api: str, model: str, ids: bool, strict: bool) -> str | None:
    """Sends a small request; None if it is taken, else the refusal."""
    body: dict[str, Any] = {"model": model, "max_tokens": _PROBE_TOKENS, "temperature": 0.0}
    if api == "chat":
        body["messages"] = [{"role": "user", "content": "time"}]
    else:
        # Any vocabulary has low ids; which text they mean does not matter.
        body["prompt"] = [300, 301] if ids else "time"
    if not strict:
        body |= {"ignore_eos": True, "min_tokens": _PROBE_TOKENS}
    try:
        _post(base + API_PATHS[api], body)
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
    except OSError as error:
        return str(error)
    return None


def _version(base: str) -> str:
    try:
        return str(json.loads(_get(f"{base}/version")).get("version", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _get(url: str) -> str:
    with _DIRECT.open(url, timeout=_TIMEOUT_S) as answer:
        return str(answer.read().decode())


def _post(url: str, body: dict[str, Any]) -> str:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with _DIRECT.open(request, timeout=_TIMEOUT_S) as answer:
        return str(answer.read().decode())
