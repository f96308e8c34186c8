"""Is it the target that the server serves, and does it go on being it?

What a server says of itself is compared with the target's files as far as it reaches: files that this host can read, a
hub id, an architecture. And a canary, a fixed prompt asked before, between and after, shows another model behind the same
words: its tokens must be the same and its log-probabilities near. Near ties may flip when other requests share a batch.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_model.engines.answer import Engine, Refusal
from dflash_model.errors import InputError, StageError
from dflash_model.target.fingerprint import fingerprint
from dflash_model.target.model_directory import CONFIG_NAME, read_config
from dflash_model.target.prompts import RenderedPrompt

log = logging.getLogger(__name__)

FILES, NAME, ARCHITECTURE, NOTHING = "files", "name", "architecture", "nothing"
CANARY_TEXT = "The harbour was quiet that morning. An old woman with a red umbrella walked along the pier and said:"
CANARY_TOKENS = 16
NEAR_NATS = 0.25
"""Two askings of the same model: bf16 kernels in other batches move a log-probability by hundredths; another model by more."""

NEAR_TIE_AFTER = 4
"""Tokens that must agree before a parting counts as a near tie and not as another model."""

TRIES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """What the server answered to the fixed prompt."""

    token_ids: tuple[int, ...]
    """Its tokens."""

    logprobs: tuple[float, ...] | None
    """Their log-probabilities, where it tells them."""

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Canary:
        """Read `to_json`'s value."""
        logprobs = data["logprobs"]
        return cls(token_ids=tuple(data["token_ids"]), logprobs=None if logprobs is None else tuple(logprobs))

    def same_model(self, other: Canary) -> bool:
        """Equal tokens with near log-probabilities; or tokens that part at a near tie, near up to there."""
        common = next(
            (place for place, (a, b) in enumerate(zip(self.token_ids, other.token_ids, strict=False)) if a != b),
            min(len(self.token_ids), len(other.token_ids)),
        )
        parts = common < max(len(self.token_ids), len(other.token_ids))
        if self.logprobs is None or other.logprobs is None:
            return not parts
        near = [abs(a - b) <= NEAR_NATS for a, b in zip(self.logprobs, other.logprobs, strict=False)]
        return all(near[: common + 1]) and (not parts or common >= NEAR_TIE_AFTER)


def ask_canary(engine: Engine, tokenizer: Any) -> Canary | None:
    """Ask the fixed prompt; None where its tokens cannot be told exactly. Raises EvalError."""
    token_ids = tuple(tokenizer(CANARY_TEXT, add_special_tokens=False)["input_ids"])
    if engine.can_continue:
        answer = engine.go_on(token_ids, count=CANARY_TOKENS, counted_as="checks")
    else:
        prompt = RenderedPrompt(
            id="canary", category=None, token_ids=tuple(tokenizer(CANARY_TEXT)["input_ids"]), text=CANARY_TEXT
        )
        told = engine.ask(prompt, max_new_tokens=CANARY_TOKENS)
        if isinstance(told, Refusal):
            log.info("the canary cannot be told exactly: %s", told.reason)
            return None
        answer = told
    return Canary(token_ids=answer.token_ids, logprobs=answer.logprobs)


def require_same(engine: Engine, tokenizer: Any, *, identity: dict[str, Any], canary: Canary | None, since: str) -> None:
    """Raises StageError where the server is not what it was: another model info, or another answer to the canary."""
    now = engine.identity()
    if now != identity:
        changed = sorted(name for name in now.keys() | identity.keys() if now.get(name) != identity.get(name))
        raise StageError(
            f"The server serves another model than {since}: {changed[0]} was {identity.get(changed[0])!r}, "
            f"is {now.get(changed[0])!r}.",
            "Let it serve the target throughout, then run again; answers from before are kept.",
        )
    if canary is None:
        return
    for _ in range(TRIES):
        again = ask_canary(engine, tokenizer)
        if again is not None and canary.same_model(again):
            return
    raise StageError(
        f"The server answers a fixed prompt otherwise than {since}: it was restarted with another model, or is not deterministic.",
        "Let it serve the target throughout, then run again; answers that were not confirmed are asked for anew.",
    )


def served_as_target(identity: dict[str, Any], directory: Path, *, hub_id: str | None) -> str:
    """How far the server's word reaches: FILES, NAME, ARCHITECTURE or NOTHING. Raises InputError where it names another model."""
    path = identity.get("model_path") or identity.get("root") or identity.get("id")
    if isinstance(path, str) and Path(path).is_absolute() and (Path(path) / CONFIG_NAME).is_file():
        differences = fingerprint(Path(path)).differences(fingerprint(directory))
        if differences:
            raise InputError(
                f"The server serves {path}, which is not the target in {directory}: {differences[0]}.",
                "Let it serve the target, or name what it serves as the target.",
            )
        return FILES
    if hub_id is not None and path == hub_id:
        return NAME
    return _by_architecture(identity, directory)


def _by_architecture(identity: dict[str, Any], directory: Path) -> str:
    config = read_config(directory)
    said = {name: identity[name] for name in ("model_type", "architectures") if identity.get(name) and config.get(name)}
    for name, value in said.items():
        if value != config[name]:
            raise InputError(
                f"The server serves a model of {name} {value!r}; the target has {config[name]!r}.",
                "Let it serve the target, or name what it serves as the target.",
            )
    return ARCHITECTURE if said else NOTHING
