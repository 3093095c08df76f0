"""Measures expert parallelism: the cluster, the communicators and the all-to-all benchmark."""

__version__ = "0.1.0"
