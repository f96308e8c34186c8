"""From the name of a protocol to an engine that speaks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_model.engines.answer import Engine
from dflash_model.engines.client import JsonClient
from dflash_model.engines.openai import OpenAiIds, OpenAiText
from dflash_model.engines.sglang import Sglang

PROTOCOLS: dict[str, type[Sglang] | type[OpenAiIds] | type[OpenAiText]] = {
    engine.name: engine for engine in (Sglang, OpenAiIds, OpenAiText)
}


def open_engine(protocol: str, client: JsonClient, tokenizer: Any, *, stop_ids: Sequence[int]) -> Engine:
    """The engine behind `client`. ValueError for an unknown protocol."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol {protocol!r}, expected one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[protocol](client, tokenizer, stop_ids=stop_ids)
