"""Hydra's and OmegaConf's exceptions in words that help: key, place, allowed, nearest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from ep_ray.config.folder import config_dir
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
        return _missing_option(error, overrides)
    if "No match in the defaults list" in str(error):
        return _group_without_plus(error)
    if "more than once in the final defaults list" in str(error):
        return _chosen_twice(error)
    for cause in _chain(error):
        if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
            return _unknown_key(cause, error, overrides)
        if isinstance(cause, MissingMandatoryValue):
            return ConfigError(f"no value for `{cause.full_key}`: give one with KEY=VALUE")
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return _wrong_value(cause, error, overrides)
    return _below_nothing(overrides) or ConfigError(
        f"{str(error).strip()}\n  in: {' '.join(overrides)}"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: object) -> str:
    return str(error).strip().splitlines()[0]


def _missing_option(error: MissingConfigException, overrides: Sequence[str]) -> ConfigError:
    wanted = error.missing_cfg_file or "?"
    group, _, name = wanted.rpartition("/")
    if error.options is None:
        return ConfigError(f"no config `{wanted}`. {_first_line(error)}")
    where = _place(error, group, overrides)
    if "conf/config.yaml" in where:  # Hydra resolves the `override` lines of an experiment there
        where = "the defaults of the experiment"
    allowed = did_you_mean(name, error.options)
    return ConfigError(f"no `{group}` called `{name}`, asked for in {where}: {allowed}")


def _group_without_plus(error: BaseException) -> ConfigError:
    key = str(error).split("'")[1]
    if key.split("@")[0] in GROUPS:
        return ConfigError(f"`{key}` is chosen with a plus here: write `+{key}=...`")
    return ConfigError(f"no group `{key}`: {did_you_mean(key, GROUPS)}")


def _chosen_twice(error: BaseException) -> ConfigError:
    group = str(error).split()[0]
    return ConfigError(
        f"`{group}` is chosen twice: an experiment's defaults replace the usual choice with "
        f"`override /{group}: NAME`"
    )


def _place(error: BaseException, key: str, overrides: Sequence[str]) -> str:
    """Where a key was written: an override, or the file that Hydra names."""
    for override in overrides:
        written = _key(override)
        if written == key or written.startswith(f"{key}.") or key.startswith(f"{written}["):
            return f"override `{override}`"
    message = str(error)
    if message.startswith("In '"):
        file = f"{message.split(chr(39))[1]}.yaml"
        shipped = (config_dir() / file).is_file()
        return f"file `conf/{file}`" if shipped else f"file `{file}` of --config-dir"
    return "the configuration"


def _key(override: str) -> str:
    return override.lstrip("+~").split("=")[0]


def _unknown_key(
    cause: OmegaConfBaseException, error: BaseException, overrides: Sequence[str]
) -> ConfigError:
    full_key = str(cause.full_key)
    parent, _, leaf = full_key.rpartition(".")
    place = _place(error, full_key, overrides)
    if get_origin(_hint(parent)) is dict:
        return ConfigError(f"`{full_key}` in {place}: {_how_to_add(full_key)}")
    prefix = f"{parent}." if parent else ""
    allowed = list(_keys_of(parent)) + (list(GROUPS) if not parent else [])
    return ConfigError(
        f"unknown key `{full_key}` in {place}: {did_you_mean(leaf, set(allowed), prefix)}"
    )


def _how_to_add(full_key: str) -> str:
    """How a new name comes into a mapping with free names."""
    parent, _, leaf = full_key.rpartition(".")
    group = {"against.arms": "arm", "against.backends": "backend"}.get(parent)
    if group:
        how = f"+{group}@{full_key}=NAME (NAME from conf/{group}/)"
    elif is_dataclass(get_args(_hint(parent))[1]):
        how = f"+{parent}={{{leaf}: {{{', '.join(f'{k}: ...' for k in _keys_of(full_key))}}}}}"
    else:
        how = f"+{full_key}=VALUE"
    return f"`{parent}` has no `{leaf}` yet; add it with {how}"


def _below_nothing(overrides: Sequence[str]) -> ConfigError | None:
    """An override of a key below a section that is null, which OmegaConf does not name."""
    for override in overrides:
        parts = _key(override).split(".")
        for depth in range(1, len(parts)):
            path = ".".join(parts[:depth])
            if NoneType in get_args(_hint(path)) and _keys_of(path):
                return ConfigError(
                    f"`{path}` is null, so override `{override}` has nothing to change: first "
                    f"choose one with +{parts[depth - 1]}@{path}=NAME"
                )
    return None


def _hint(path: str) -> Any:
    """The type that the schema gives a dotted path; None where it knows no such path."""
    node: Any = Config
    for part in path.split(".") if path else []:
        node = _without_none(node)
        if get_origin(node) is dict:  # the part is a free name, such as that of an arm
            node = get_args(node)[1]
        else:
            node = get_type_hints(node).get(part) if is_dataclass(node) else None
    return node


def _keys_of(path: str) -> list[str]:
    """Keys that the schema allows below a dotted path."""
    node = _without_none(_hint(path))
    return [f.name for f in fields(node)] if is_dataclass(node) else []


def _without_none(hint: Any) -> Any:
    """`X` for the hint `X | None`; any other hint as it is."""
    inner = [arg for arg in get_args(hint) if arg is not NoneType]
    return inner[0] if NoneType in get_args(hint) else hint


def _wrong_value(
    cause: OmegaConfBaseException, error: BaseException, overrides: Sequence[str]
) -> ConfigError:
    key = str(cause.full_key)
    if "is not a subclass of" in str(cause):
        return _new_entry(key, overrides) or ConfigError(_first_line(cause))
    place = _place(error, key, overrides)
    listed = get_origin(_hint(key)) is list and "ListConfig" in str(cause)
    mend = f" Write a list: {key}=[...]" if listed else ""
    return ConfigError(f"`{key}` in {place}: {_first_line(cause)}{mend}")


def _new_entry(leaf: str, overrides: Sequence[str]) -> ConfigError | None:
    """`+against.arms.new.tp=2`: Hydra would make `new` of nothing, and names only `new`."""
    for override in overrides:
        parts = _key(override).split(".")
        parent = ".".join(parts[: parts.index(leaf)]) if leaf in parts else ""
        if get_origin(_hint(parent)) is dict:
            return ConfigError(f"override `{override}`: {_how_to_add(f'{parent}.{leaf}')}")
    return None
