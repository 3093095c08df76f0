"""Trials and their results: planning, running, Arrow tables, statistics and reports."""
