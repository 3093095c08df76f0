"""Entry of a sweep: `python -m ep_ray.sweep +exp=NAME [KEY=VALUE ...]`.

Every point of the command line is composed, typed and checked before Hydra starts the first,
so that a mistake in the last point of a multirun costs nothing.
"""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from ep_ray.config.compose import compose_all, register, typed
from ep_ray.config.errors import ConfigError
from ep_ray.config.folder import CONFIG_NAME, config_dir
from ep_ray.config.schema import Config

# Exit codes: all trials fine, a trial failed, the command line cannot run.
OK, FAILED, REFUSED = 0, 1, 2
_INFORMATIVE = ("help", "hydra_help", "version", "shell_completion", "info")


def main() -> None:
    """Runs a sweep and exits with 0 (all trials fine), 1 (some failed) or 2 (refused)."""
    register()
    arguments = get_args_parser().parse_args()
    informative = any(getattr(arguments, name, None) for name in _INFORMATIVE)
    try:
        # Completion asks with half-written words, help with none: nothing to check there.
        points = [] if informative else _points(arguments)
        if informative or arguments.cfg:
            _hydra_main(lambda _: None)
            sys.exit(OK)
        sys.exit(_sweep(points))
    except ConfigError as error:
        _refuse(error)


def _refuse(error: ConfigError) -> NoReturn:
    print(f"ep-ray: {error}", file=sys.stderr)
    sys.exit(REFUSED)


def _points(arguments: Any) -> list[Config]:
    if arguments.config_path or arguments.config_name:
        raise ConfigError(
            "--config-path and --config-name would replace the schema: add a folder of your own "
            "experiments with --config-dir=FOLDER (FOLDER/exp/NAME.yaml, then +exp=NAME)"
        )
    if arguments.cfg and arguments.multirun:
        raise ConfigError("--cfg shows one configuration: leave -m and the sweep's values out")
    return compose_all(arguments.overrides, arguments.multirun, arguments.config_dir)


def _sweep(points: list[Config]) -> int:
    from sweeps.sweep import Sweep  # looks up; heavy, so only when something is run

    # A terminated driver must tear its ranks down as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sweep = Sweep(points)
    try:
        _hydra_main(lambda composed: _run(sweep, composed))
        return OK if sweep.finish() else FAILED
    except KeyboardInterrupt:
        print("ep-ray: interrupted; finished trials are kept", file=sys.stderr)
        sweep.finish()
        return FAILED
    finally:
        sweep.close()


def _run(sweep: Any, composed: DictConfig) -> None:
    try:
        sweep.run(typed(composed))
    except ConfigError as error:  # Ray does not start, say: Hydra would print a traceback
        _refuse(error)


def _hydra_main(task: Any) -> None:
    def run(composed: DictConfig) -> None:
        task(composed)

    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=CONFIG_NAME)(run)()


if __name__ == "__main__":
    main()
