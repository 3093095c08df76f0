"""Hydra's and OmegaConf's exceptions in words that help: key, place, allowed, nearest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from ep_ray.config.errors import ConfigError, did_you_mean
from ep_ray.config.schema import Config

GROUPS = (
    "arm", "backend", "cluster", "exp", "load", "model", "router", "transport", "workload",
)  # fmt: skip


def explain(error: BaseException, overrides: Sequence[str]) -> ConfigError:
    """Puts an exception of Hydra or OmegaConf into one `ConfigError`.

    Args:
        error: What was raised while composing or merging.
        overrides: The command line's overrides, to name the one at fault.
    """
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"cannot read override `{error.override}`: {_first_line(error)}\n"
            "  write KEY=VALUE; quote values that the shell or Hydra reads as syntax"
        )
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if "No match in the defaults list" in str(error):
        return _group_without_plus(error)
    for cause in _chain(error):
        if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
            return _unknown_key(cause, error, overrides)
        if isinstance(cause, MissingMandatoryValue):
            return ConfigError(f"no value for `{cause.full_key}`: give one with KEY=VALUE")
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return _wrong_value(cause, error, overrides)
    return ConfigError(str(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: object) -> str:
    return str(error).strip().splitlines()[0]


def _missing_option(error: MissingConfigException) -> ConfigError:
    wanted = error.missing_cfg_file or "?"
    group, _, name = wanted.rpartition("/")
    if error.options is None:
        return ConfigError(f"no config `{wanted}`. {_first_line(error)}")
    return ConfigError(f"no `{group}` called `{name}`: {did_you_mean(name, error.options)}")


def _group_without_plus(error: BaseException) -> ConfigError:
    key = str(error).split("'")[1]
    if key.split("@")[0] in GROUPS:
        return ConfigError(f"`{key}` is chosen with a plus here: write `+{key}=...`")
    return ConfigError(f"no group `{key}`: {did_you_mean(key, GROUPS)}")


def _place(error: BaseException, key: str, overrides: Sequence[str]) -> str:
    """Where a key was written: an override, or the file that Hydra names."""
    for override in overrides:
        if override.lstrip("+~").split("=")[0] == key:
            return f"override `{override}`"
    message = str(error)
    if message.startswith("In '"):
        return f"file `conf/{message.split(chr(39))[1]}.yaml`"
    return "the configuration"


def _unknown_key(
    cause: OmegaConfBaseException, error: BaseException, overrides: Sequence[str]
) -> ConfigError:
    full_key = str(cause.full_key)
    parent, _, leaf = full_key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    allowed = list(_keys_of(parent)) + (list(GROUPS) if not parent else [])
    return ConfigError(
        f"unknown key `{full_key}` in {_place(error, full_key, overrides)}: "
        f"{did_you_mean(leaf, set(allowed), prefix)}"
    )


def _keys_of(path: str) -> Iterable[str]:
    """Keys that the schema allows below a dotted path."""
    node: Any = Config
    for part in path.split(".") if path else []:
        if get_origin(node) is dict:  # the part is a free name, such as that of an arm
            node = get_args(node)[1]
        elif is_dataclass(node):
            node = _without_none(get_type_hints(node).get(part))
    return [f.name for f in fields(node)] if is_dataclass(node) else []


def _without_none(hint: Any) -> Any:
    """`X` for the hint `X | None`; any other hint as it is."""
    inner = [arg for arg in get_args(hint) if arg is not NoneType]
    return inner[0] if NoneType in get_args(hint) else hint


def _wrong_value(
    cause: OmegaConfBaseException, error: BaseException, overrides: Sequence[str]
) -> ConfigError:
    key = str(cause.full_key)
    return ConfigError(f"`{key}` in {_place(error, key, overrides)}: {_first_line(cause)}")
