"""Stage references: the target's greedy completions, one JSON line a prompt. Each sample is kept as soon as it is done.

Parameters: max_new_tokens, overshoot_tokens, thinking, dtype. A killed stage goes on where it stopped, and ten more
prompts cost ten completions: every sample has a key of its own below `<work dir>/samples/`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_model.errors import StorageError
from dflash_model.stages.protocol import Context
from dflash_model.stages.target_directory import target_directory
from dflash_model.storage import read_json, write_json
from dflash_model.target.backbone import Backbone, load_backbone
from dflash_model.target.greedy import ENGINE, generate_reference
from dflash_model.target.kernels import describe_backend
from dflash_model.target.model_directory import read_config, text_config
from dflash_model.target.prompts import RenderedPrompt, load_tokenizer, read_prompts, render, template_digest
from dflash_model.target.references import Reference, reference_from_json, reference_key, reference_to_json, write_references
from dflash_model.target.stop_tokens import read_stop_ids

REFERENCES_FILE = "references.jsonl"


def run(context: Context) -> None:
    """Render the prompts, answer those that have no answer yet, write them in order."""
    wanted = context.parameters
    directory = target_directory(context)
    tokenizer = load_tokenizer(directory)
    positions = text_config(read_config(directory)).get("max_position_embeddings") or 1 << 30
    prompts = read_prompts(context.input_path("prompts") / "prompts.jsonl")
    rendered = render(prompts, tokenizer, thinking=wanted["thinking"], max_prompt_tokens=positions - wanted["max_new_tokens"])
    maker = _Maker(context, directory, tokenizer)
    references = [maker.reference(prompt, done, len(rendered)) for done, prompt in enumerate(rendered)]
    with context.writing() as writer:
        write_references(writer.path / REFERENCES_FILE, references)
        writer.facts |= _facts(references, rendered)
        writer.facts["template_digest"] = template_digest(tokenizer, thinking=wanted["thinking"])
        writer.facts["target"] = context.input_manifest("target").facts["fingerprint"]
        writer.made_by |= {"generated": maker.generated, "reused": len(references) - maker.generated, "backend": maker.backend}
    finishes = writer.facts["finishes"]
    context.milestone(
        f"{len(references)} references, {maker.generated} of them new; {finishes.get('stop', 0)} end by a stop token"
    )


def _facts(references: Sequence[Reference], rendered: Sequence[RenderedPrompt]) -> dict[str, Any]:
    return {
        "count": len(references),
        "categories": {prompt.id: prompt.category for prompt in rendered},
        "finishes": dict(sorted(Counter(reference.finish for reference in references).items())),
        "completion_tokens": sum(len(reference.completion_ids) for reference in references),
    }


class _Maker:
    """Answers prompts; the target is loaded when the first one has no answer yet."""

    def __init__(self, context: Context, directory: Path, tokenizer: Any) -> None:
        self._context, self._directory, self._tokenizer = context, directory, tokenizer
        self._backbone: Backbone | None = None
        self._stop_ids: tuple[int, ...] | None = None
        self._target = context.input_manifest("target").facts["fingerprint"]
        self.generated = 0
        self.backend: dict[str, Any] | None = None

    def reference(self, prompt: RenderedPrompt, done: int, total: int) -> Reference:
        """The kept answer to `prompt`, or a new one, kept before it is returned."""
        wanted = self._context.parameters
        key = reference_key(
            prompt.token_ids,
            self._target,
            max_new_tokens=wanted["max_new_tokens"],
            overshoot_tokens=wanted["overshoot_tokens"],
            stop_ids=self._stops(),
            engine=ENGINE,
            dtype=wanted["dtype"],
        )
        path = self._context.request.work_dir / "samples" / f"{key}.json"
        kept = None if self._context.local.get("fresh") else _read_kept(path, prompt)
        if kept is None:
            kept = generate_reference(
                self._loaded(),
                prompt,
                stop_ids=self._stops(),
                max_new_tokens=wanted["max_new_tokens"],
                overshoot_tokens=wanted["overshoot_tokens"],
            )
            write_json(path, reference_to_json(kept))
            self.generated += 1
        self._context.progress(done + 1, total, "prompts")
        return kept

    def _stops(self) -> tuple[int, ...]:
        if self._stop_ids is None:
            self._stop_ids = read_stop_ids(self._directory, self._tokenizer)
        return self._stop_ids

    def _loaded(self) -> Backbone:
        if self._backbone is None:
            self._context.milestone("loading the target")
            self._backbone = load_backbone(self._directory, dtype=self._context.parameters["dtype"], device=self._device)
            self.backend = describe_backend(self._backbone)
        return self._backbone

    @property
    def _device(self) -> str:
        return str(self._context.local.get("device", "cpu"))


def _read_kept(path: Path, prompt: RenderedPrompt) -> Reference | None:
    """An answer made earlier for the same tokens, under this prompt's id; None where there is none or it is damaged."""
    if not path.is_file():
        return None
    try:
        data = read_json(path) | {"sample_id": prompt.id}
        reference = reference_from_json(data)
    except (StorageError, ValueError, KeyError, TypeError):
        return None
    return reference if reference.prompt_ids == tuple(prompt.token_ids) else None
