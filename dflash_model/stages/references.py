"""Stage references: the target's greedy completions, one JSON line a prompt. Each sample is kept as soon as it is done.

Parameters: max_new_tokens, overshoot_tokens, thinking, from (transformers, or the protocol of a serving engine), dtype (None
with an engine). `local.server`: where the engine is, as seen from this host. A killed stage goes on where it stopped, and
ten more prompts cost ten completions: every sample has a key of its own below `<work dir>/samples/`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dflash_model.errors import StageError
from dflash_model.stages.protocol import Context
from dflash_model.stages.target_directory import target_directory
from dflash_model.target.model_directory import read_config, text_config
from dflash_model.target.prompts import RenderedPrompt, load_tokenizer, read_prompts, render, template_digest
from dflash_model.target.references import TEXT, Reference, reference_key, write_references
from dflash_model.target.sample_store import Kept, SampleStore
from dflash_model.target.stop_tokens import read_stop_ids

if TYPE_CHECKING:
    from dflash_model.engines.session import Session
    from dflash_model.target.backbone import Backbone

log = logging.getLogger(__name__)

REFERENCES_FILE = "references.jsonl"
IN_PROCESS = "transformers"
NO_LIMIT = 1 << 30


class _Maker(Protocol):
    @property
    def generated(self) -> int: ...

    def answers(self, prompts: Sequence[RenderedPrompt]) -> list[Kept]: ...

    def made_by(self) -> dict[str, Any]: ...


def run(context: Context) -> None:
    """Render the prompts, answer those that have no answer yet, write them in order."""
    wanted = context.parameters
    directory = target_directory(context)
    tokenizer = load_tokenizer(directory)
    positions = text_config(read_config(directory)).get("max_position_embeddings") or NO_LIMIT
    prompts = read_prompts(context.input_path("prompts") / "prompts.jsonl")
    rendered = render(prompts, tokenizer, thinking=wanted["thinking"], max_prompt_tokens=positions - wanted["max_new_tokens"])
    make: type[_InProcess] | type[_FromServer] = _InProcess if wanted["from"] == IN_PROCESS else _FromServer
    maker: _Maker = make(context, directory, tokenizer, positions)
    answers = dict(zip(rendered, maker.answers(rendered), strict=True))
    references = [kept for kept in answers.values() if isinstance(kept, Reference)]
    refused = {prompt.id: kept for prompt, kept in answers.items() if isinstance(kept, str)}
    if not references:
        prompt_id, reason = next(iter(refused.items()))
        raise StageError(
            f"No answer can be told exactly; prompt {prompt_id}: {reason}.",
            "Use an engine that returns token ids, or transformers.",
        )
    with context.writing() as writer:
        write_references(writer.path / REFERENCES_FILE, references)
        writer.facts |= _facts(references, [prompt for prompt in rendered if prompt.id not in refused])
        writer.facts |= {"from": wanted["from"], "refused": refused}
        writer.facts["template_digest"] = template_digest(tokenizer, thinking=wanted["thinking"])
        writer.facts["target"] = context.input_manifest("target").facts["fingerprint"]
        reused = len(rendered) - maker.generated
        writer.made_by |= {"generated": maker.generated, "reused": reused, **maker.made_by()}
    _say(context, references, refused, generated=maker.generated)


def _say(context: Context, references: Sequence[Reference], refused: dict[str, str], *, generated: int) -> None:
    stopped = sum(reference.stopped for reference in references)
    context.milestone(f"{len(references)} references, {generated} of them new; {stopped} end by a stop token")
    if any(reference.token_source == TEXT for reference in references):
        context.milestone(
            "The server tells text only: tokens are the text's own tokenisation, and none are known past the end of an answer."
        )
    if refused:
        prompt_id, reason = next(iter(refused.items()))
        context.milestone(f"{len(refused)} prompts are left out, their answers cannot be told exactly; {prompt_id}: {reason}")


def _facts(references: Sequence[Reference], rendered: Sequence[RenderedPrompt]) -> dict[str, Any]:
    return {
        "count": len(references),
        "categories": {prompt.id: prompt.category for prompt in rendered},
        "finishes": dict(sorted(Counter(reference.finish for reference in references).items())),
        "completion_tokens": sum(len(reference.completion_ids) for reference in references),
        "token_source": references[0].token_source,
    }


def _store(context: Context, stop_ids: Sequence[int]) -> SampleStore:
    wanted = context.parameters
    target = context.input_manifest("target").facts["fingerprint"]

    def key_of(prompt: RenderedPrompt) -> str:
        return reference_key(
            prompt.token_ids,
            target,
            max_new_tokens=wanted["max_new_tokens"],
            overshoot_tokens=wanted["overshoot_tokens"],
            stop_ids=stop_ids,
            engine=wanted["from"],
            dtype=wanted["dtype"],
        )

    return SampleStore(context.request.work_dir / "samples", key_of, fresh=bool(context.local.get("fresh")))


class _InProcess:
    """Answers prompts here; the target is loaded when the first one has no answer yet."""

    def __init__(self, context: Context, directory: Path, tokenizer: Any, _positions: int) -> None:
        self._context, self._directory = context, directory
        self._stop_ids = read_stop_ids(directory, tokenizer)
        self._store = _store(context, self._stop_ids)
        self._backbone: Backbone | None = None
        self.generated = 0
        self._backend: dict[str, Any] | None = None

    def answers(self, prompts: Sequence[RenderedPrompt]) -> list[Kept]:
        """A reference for each prompt, kept before the next is begun."""
        found: list[Kept] = []
        for done, prompt in enumerate(prompts):
            found.append(self._store.read(prompt) or self._make(prompt))
            self._context.progress(done + 1, len(prompts), "prompts")
        return found

    def made_by(self) -> dict[str, Any]:
        """Which kernels computed; None where nothing was computed."""
        return {"backend": self._backend}

    def _make(self, prompt: RenderedPrompt) -> Reference:
        from dflash_model.target.greedy import generate_reference

        wanted = self._context.parameters
        made = generate_reference(
            self._loaded(),
            prompt,
            stop_ids=self._stop_ids,
            max_new_tokens=wanted["max_new_tokens"],
            overshoot_tokens=wanted["overshoot_tokens"],
        )
        self._store.write(prompt, made)
        self.generated += 1
        return made

    def _loaded(self) -> Backbone:
        from dflash_model.target.backbone import load_backbone
        from dflash_model.target.kernels import describe_backend

        if self._backbone is None:
            self._context.milestone("loading the target")
            device = str(self._context.local.get("device", "cpu"))
            self._backbone = load_backbone(self._directory, dtype=self._context.parameters["dtype"], device=device)
            self._backend = describe_backend(self._backbone)
        return self._backbone


class _FromServer:
    """Answers prompts through a serving engine; torch is not loaded, and no GPU is needed."""

    def __init__(self, context: Context, directory: Path, tokenizer: Any, positions: int) -> None:
        from dflash_model.engines.access import ServerAccess
        from dflash_model.engines.client import JsonClient
        from dflash_model.engines.identity import served_as_target
        from dflash_model.engines.opening import open_engine
        from dflash_model.engines.session import Session, Wish

        wanted, local = context.parameters, context.local
        stop_ids = read_stop_ids(directory, tokenizer)
        access = ServerAccess.from_json(local["server"])
        self._client = JsonClient(access)
        self._session: Session = Session(
            open_engine(wanted["from"], self._client, tokenizer, stop_ids=stop_ids),
            _store(context, stop_ids),
            tokenizer,
            Wish(max_new_tokens=wanted["max_new_tokens"], overshoot_tokens=wanted["overshoot_tokens"], max_positions=positions),
            accept=lambda identity: served_as_target(identity, directory, hub_id=local.get("hub_id")),
            concurrency=access.concurrency,
            on_progress=lambda done, total: context.progress(done, total, "prompts"),
        )

    @property
    def generated(self) -> int:
        """Prompts that were asked now."""
        return self._session.generated

    def answers(self, prompts: Sequence[RenderedPrompt]) -> list[Kept]:
        """A reference for each prompt, or why it has none."""
        try:
            return self._session.answers(prompts)
        finally:
            self._client.close()

    def made_by(self) -> dict[str, Any]:
        """Who answered, how far it is known to be the target, and how many requests of each kind were made."""
        session = self._session
        return {"server": session.identity, "accepted_as": session.accepted_as, "requests": dict(self._client.sent)}
