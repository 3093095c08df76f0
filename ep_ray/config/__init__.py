"""Typed configuration. Nothing here imports ray, torch or vllm."""
