"""Entry of a sweep: `python -m ep_ray.sweep +exp=NAME [KEY=VALUE ...]`.

Every point of the command line is composed, typed and checked before Hydra starts the first,
so that a mistake in the last point of a multirun costs nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from hydra._internal.utils import get_args_parser

from ep_ray import interrupt
from ep_ray.config.compose import compose_all, register, typed
from ep_ray.config.errors import ConfigError, SweepError
from ep_ray.config.schema import Config
from ep_ray.hydra_bridge import ThroughHydra, run_jobs

# Exit codes: all trials fine, a trial failed, the command line cannot run.
OK, FAILED, REFUSED = 0, 1, 2
_INFORMATIVE = ("help", "hydra_help", "version", "shell_completion", "info")


def main() -> None:
    """Runs a sweep and exits.

    Exit codes: 0 when all trials are fine, 1 when some failed or the sweep was interrupted
    (Ctrl-C, SIGTERM), 2 when the command line cannot run here.
    """
    interrupt.install()
    try:
        sys.exit(_main())
    except ConfigError as error:
        print(f"ep-ray: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    except SweepError as error:
        print(f"ep-ray: {error}", file=sys.stderr)
        sys.exit(FAILED)
    except BrokenPipeError:
        # The reader (`head`, a pager) has seen enough.
        sys.stderr.close()
        sys.exit(FAILED)
    except KeyboardInterrupt:
        print("ep-ray: interrupted", file=sys.stderr)
        sys.exit(FAILED)


def _main() -> int:
    register()
    arguments = get_args_parser().parse_args()
    informative = any(getattr(arguments, name, None) for name in _INFORMATIVE)
    # Completion asks with half-written words, help with none: nothing to check there.
    points = [] if informative else _points(arguments)
    if informative or arguments.cfg:
        run_jobs(lambda _: None)
        return OK
    return _sweep(points)


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

    sweep = Sweep(points)
    try:
        run_jobs(lambda composed: sweep.run(typed(composed)))
        return OK if sweep.finish() else FAILED
    except ThroughHydra as stop:
        raise stop.error from None
    finally:
        with interrupt.uninterrupted():
            sweep.close()
            interrupt.ignore()


if __name__ == "__main__":
    main()
