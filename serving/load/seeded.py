"""Random draws that follow from a name alone, so that any process can repeat them."""

from __future__ import annotations

import hashlib

import numpy as np


def digest(key: str) -> bytes:
    """SHA-256 of a name."""
    return hashlib.sha256(key.encode()).digest()


def generator(key: str) -> np.random.Generator:
    """A generator of its own for each name."""
    return np.random.default_rng(int.from_bytes(digest(key)[:16]))
