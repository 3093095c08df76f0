"""Reads real top-k choices from a file: .npy, or .parquet of K integer columns or one of lists."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RoutingTable:
    """`topk_idx` int64 `[N, K]`, -1 where masked; `digest` the SHA-256 of the file."""

    topk_idx: NDArray[np.int64]
    digest: str


def read_routing(path: str, experts: int, topk: int) -> RoutingTable:
    """Reads and validates a file of choices, one token a row.

    Raises:
        ValueError: The file is missing, unreadable, or does not fit the workload.
    """
    where = f"`workload.routing_file={path}`"
    if not Path(path).is_file():
        raise ValueError(f"{where}: no such file; it is read where the sweep is started")
    rows = _load(Path(path), where)
    _validate(rows, where, experts, topk)
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return RoutingTable(rows.astype(np.int64), digest)


def _load(path: Path, where: str) -> NDArray[Any]:
    loaders = {".npy": _load_npy, ".parquet": _load_parquet}
    if path.suffix not in loaders:
        raise ValueError(f"{where}: found {path.suffix or 'no suffix'}; write .npy or .parquet")
    try:
        return loaders[path.suffix](path)
    except Exception as error:
        raise ValueError(f"{where} cannot be read as {path.suffix}: {error}") from error


def _load_npy(path: Path) -> NDArray[Any]:
    rows: NDArray[Any] = np.load(path, allow_pickle=False)
    return rows


def _load_parquet(path: Path) -> NDArray[Any]:
    import pyarrow.parquet as pq  # heavy, and only for this kind of file

    columns = [column.to_numpy() for column in pq.read_table(path).columns]
    if len(columns) == 1 and columns[0].dtype == object:
        return np.stack(columns[0])
    return np.stack(columns, axis=1)


def _validate(rows: NDArray[Any], where: str, experts: int, topk: int) -> None:
    if rows.ndim != 2 or rows.shape[1] != topk or not len(rows):
        raise ValueError(
            f"{where}: found shape {list(rows.shape)}, asked [N, {topk}] with N >= 1;"
            " set workload.topk to the file's width, or give another file"
        )
    if not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"{where}: found {rows.dtype}, asked integers (expert numbers)")
    bad = np.argwhere((rows < -1) | (rows >= experts))
    if len(bad):
        row, column = bad[0]
        raise ValueError(
            f"{where}: expert {rows[row, column]} in row {row}; workload.experts={experts} allows"
            f" 0 to {experts - 1}, and -1 for a masked choice"
        )
    ordered = np.sort(rows, axis=1)
    twice = np.flatnonzero(
        ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    )
    if len(twice):
        raise ValueError(
            f"{where}: row {twice[0]} names an expert twice: {rows[twice[0]].tolist()}; a token's"
            " choices are distinct"
        )
