"""A results folder as a place on disk: room, lock, and files that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ep_ray.config.errors import ConfigError, SweepError

_ROOM_BYTES = 1 << 20  # that must fit before a sweep starts


def occupy(folder: Path) -> IO[str]:
    """Locks a folder for this process, and tries that it takes data.

    Returns:
        The lock: an open file that holds it until it is closed or the process ends.

    Raises:
        ConfigError: Another process writes there, or nothing can be written.
    """
    try:
        held = _lock(folder)
        for left in folder.glob("*.tmp-*"):  # of a process that was killed
            left.unlink()
        _try_room(folder)
    except BlockingIOError:
        raise ConfigError(
            f"another sweep is writing to {folder}: wait for it, or choose results=FOLDER"
        ) from None
    except OSError as error:
        raise ConfigError(no_folder(folder, error.strerror or str(error))) from error
    return held


def _lock(folder: Path) -> IO[str]:
    held = open(folder / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.close()
        raise
    return held


def _try_room(folder: Path) -> None:
    with replacing(folder / ".room") as temporary:
        temporary.write_bytes(bytes(_ROOM_BYTES))
    (folder / ".room").unlink()


def no_folder(folder: Path, reason: str) -> str:
    """Why results cannot be written to `folder`, and what to do."""
    return (
        f"cannot write results to {folder}: {reason}. Make room or give the right to write "
        "there, or choose another folder with results=FOLDER"
    )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns what the operating system says of a sweep's folder into a `SweepError`."""
    try:
        yield
    except OSError as error:
        raise SweepError(
            f"cannot write to {folder}: {error.strerror or error}. Trials that ended before are "
            f"kept: mend that, then resume={folder}"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place once it is written, and is removed otherwise."""
    temporary = path.with_suffix(f".tmp-{os.getpid()}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Brings names that were made or replaced in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
