"""From a command line to typed experiments, with errors that name key, place and remedy.

Hydra composes; this module finds `conf/`, composes every point of a command line before
Hydra starts the first, and turns Hydra's exceptions into `ConfigError`. Typed keys added
with `+` slip through Hydra, so each point is merged into the schema once more at the end.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from ep_ray.config.check import check
from ep_ray.config.errors import ConfigError
from ep_ray.config.explain import explain
from ep_ray.config.folder import CONFIG_NAME, config_dir, experiments
from ep_ray.config.schema import Config

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def register() -> None:
    """Makes the schema and the scratch folder known to Hydra. Safe to call again."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("ep_ray_scratch", _scratch, replace=True)


def _scratch() -> str:
    # Hydra insists on writing multirun.yaml; our rows hold every resolved config anyway.
    return str(Path(tempfile.gettempdir()) / f"ep_ray_hydra_{os.getuid()}")


def typed(composed: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """Turns a composed configuration into checked dataclasses.

    Args:
        composed: What Hydra made of files and overrides.
        overrides: The command line's overrides, to name the one at fault.

    Raises:
        ConfigError: An unknown key, a wrong type, a missing value or an impossible combination.
    """
    container = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(container, dict)
    container.pop("hydra", None)
    if container.get("name", "???") == "???":
        raise ConfigError(
            f"no experiment chosen: write +exp=NAME; there are {', '.join(experiments())}"
        )
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), container)
        config = OmegaConf.to_object(merged)
    except Exception as error:
        raise explain(error, overrides) from error
    assert isinstance(config, Config)
    check(config)
    return config


def compose_all(
    overrides: Sequence[str], multirun: bool, search_dir: str | None = None
) -> list[Config]:
    """Composes and checks every point of a command line, before anything starts.

    Args:
        overrides: Hydra overrides, for example `["+exp=quickstart", "load.warmups=2"]`.
        multirun: Whether `-m` was given (an experiment may ask for it as well).
        search_dir: A further folder of configs (`--config-dir`).

    Raises:
        ConfigError: The first point that is wrong, by its overrides.
    """
    if search_dir and not Path(search_dir).is_dir():
        raise ConfigError(f"--config-dir={search_dir}: no such folder")
    search = [f"hydra.searchpath=[file://{Path(search_dir).resolve()}]"] if search_dir else []
    with _hydra():
        points = _points([*search, *overrides], multirun)
        if not points:
            raise ConfigError(f"no point to run: a sweep in {' '.join(overrides)} has no values")
        return [_compose_point(point) for point in points]


def _compose_point(point: Sequence[str]) -> Config:
    try:
        composed = compose(CONFIG_NAME, overrides=list(point))
        _refuse_lost_emptying(composed, point)
        return typed(composed, point)
    except ConfigError as error:
        shown = [override for override in point if not override.startswith("hydra.")]
        raise ConfigError(f"{error}\n  in: {' '.join(shown) or '(no overrides)'}") from error
    except Exception as error:
        raise explain(error, point) from error


def _refuse_lost_emptying(composed: DictConfig, point: Sequence[str]) -> None:
    """Hydra merges mappings, so that `KEY={}` leaves every entry where it was."""
    for override in OverridesParser.create().parse_overrides(list(point)):
        if override.is_sweep_override() or override.is_delete() or override.value() != {}:
            continue
        key = override.key_or_group
        left = OmegaConf.select(composed, key)
        if isinstance(left, DictConfig) and len(left):
            names = " ".join(f"~{key}.{name!s}" for name in left)
            raise ConfigError(
                f"`{key}={{}}` changes nothing, because Hydra merges mappings; to take entries "
                f"out, write {names}"
            )


@contextmanager
def _hydra() -> Iterator[None]:
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
            yield
    finally:
        GlobalHydra.instance().clear()


def _points(overrides: Sequence[str], multirun: bool) -> list[list[str]]:
    """Overrides of each job that Hydra would start."""
    try:
        return _expanded(overrides, multirun)
    except Exception as error:
        raise explain(error, overrides) from error


def _expanded(overrides: Sequence[str], multirun: bool) -> list[list[str]]:
    """As Hydra expands them; a dynamic sweeper's points are not known, so it gives its base."""
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())  # for glob()
    parsed = parser.parse_overrides(list(overrides))
    plain = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
    if multirun:
        _refuse_lost_sweeps(plain, [o for o in parsed if o.is_sweep_override()])
    hydra = compose(CONFIG_NAME, overrides=plain, return_hydra_config=True).hydra
    if not multirun and (hydra.mode is None or hydra.mode.name != "MULTIRUN"):
        return [list(overrides)]
    if hydra.sweeper._target_ != _BASIC_SWEEPER:
        return [plain]
    params = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
    batches = BasicSweeper.split_arguments(parser.parse_overrides(params) + parsed, None)
    return [list(point) for batch in batches for point in batch]


def _refuse_lost_sweeps(plain: Sequence[str], sweeps: Sequence[Any]) -> None:
    """Hydra drops an experiment's own sweeper when several experiments are swept at once."""
    for override in sweeps:
        if override.key_or_group != "exp":
            continue
        for name in override.sweep_string_iterator():
            composed = compose(
                CONFIG_NAME, overrides=[*plain, f"+exp={name}"], return_hydra_config=True
            )
            if composed.hydra.sweeper.get("params") or composed.hydra.mode is not None:
                raise ConfigError(
                    f"`-m +exp=...` over several experiments would drop the sweep that "
                    f"experiment `{name}` defines for itself; run that one in its own command"
                )
