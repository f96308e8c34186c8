"""The environment variables that every stage program gets, wherever it runs."""

from __future__ import annotations

from typing import Any


def stage_variables(threads: int, *, gpu: int | None = None) -> dict[str, str]:
    """Variables that keep a stage program to `threads` CPU threads, quiet while it waits, and its log unbuffered.

    `gpu`: the only GPU that it may see, by nvidia-smi's number; None: what the host's own environment says.
    """
    # CUDA counts by speed unless told otherwise; nvidia-smi, the inventory and the locks count by bus.
    seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return seen | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def key_variables(local: dict[str, Any]) -> tuple[str, ...]:
    """The variable that holds the key of the serving engine which a stage shall ask, by the request's local facts."""
    server = local.get("server")
    return (server["api_key_env"],) if isinstance(server, dict) and isinstance(server.get("api_key_env"), str) else ()
