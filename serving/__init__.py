"""Serving side of ep-ray: vLLM engines, the router and the load generator."""
