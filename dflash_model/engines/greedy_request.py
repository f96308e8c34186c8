"""Sampling fields that every request names: engines fill what is left out from the model's generation_config."""

from __future__ import annotations

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""None of them may bend a greedy completion."""
