"""Starts Hydra's jobs with our task, and brings errors past Hydra unharmed."""

from __future__ import annotations

from collections.abc import Callable

import hydra
from omegaconf import DictConfig

from ep_ray.config.folder import CONFIG_NAME, config_dir


class ThroughHydra(BaseException):
    """Carries an error past Hydra, which would explain it its own way and start the next job."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def run_jobs(task: Callable[[DictConfig], None]) -> None:
    """Runs `task` for each point of the command line, as Hydra reads it.

    Raises:
        ThroughHydra: What a task raised.
    """

    def run(composed: DictConfig) -> None:
        try:
            task(composed)
        except Exception as error:
            raise ThroughHydra(error) from error

    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=CONFIG_NAME)(run)()
