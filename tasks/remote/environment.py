"""The environment variables that every stage program gets, wherever it runs."""

from __future__ import annotations


def stage_variables(threads: int) -> dict[str, str]:
    """Variables that keep a stage program to `threads` CPU threads, quiet while it waits, and its log unbuffered."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
