"""Where `conf/` lies, and what is in it."""

from __future__ import annotations

from pathlib import Path

from ep_ray.config.errors import ConfigError

CONFIG_NAME = "config"


def config_dir() -> Path:
    """The folder `conf/`: inside the package in a wheel, beside it in a checkout.

    Raises:
        ConfigError: Neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / f"{CONFIG_NAME}.yaml").is_file():
            return folder
    raise ConfigError(f"no conf/ folder in {package} or {package.parent}: reinstall ep-ray")


def experiments() -> list[str]:
    """Names of the experiments that ep-ray ships."""
    return sorted(path.stem for path in (config_dir() / "exp").glob("*.yaml"))
