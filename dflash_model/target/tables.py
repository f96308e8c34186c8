"""Target tables: embedding, head and final norm of the target, as one small artifact; replay never loads the target.

The final norm has two forms: `plain` multiplies by w, `one_plus` by (1 + w). Taking one for the other gives logits that
look like logits, so a model type that is not listed here is refused, and the fidelity gate checks the form on real rows.

Shapes: V vocabulary rows, H hidden size, N token rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dflash_model.errors import CheckpointError, ConfigError, InputError, StorageError, from_os_error
from dflash_model.target.fingerprint import fingerprint
from dflash_model.target.model_directory import read_config, read_shard, shard_paths, text_config
from dflash_model.target.tensor_file import read_tensors, write_tensors

TABLES_VERSION = "1"
TABLES_NAME = "tables.safetensors"
PLAIN = "plain"
ONE_PLUS = "one_plus"
NORM_FORMS = {
    "llama": PLAIN, "mistral": PLAIN, "qwen2": PLAIN, "qwen3": PLAIN, "qwen3_moe": PLAIN,
    "qwen3_next": ONE_PLUS, "qwen3_5": ONE_PLUS, "qwen3_5_text": ONE_PLUS, "qwen3_5_moe": ONE_PLUS, "qwen3_5_moe_text": ONE_PLUS,
    "gemma": ONE_PLUS, "gemma2": ONE_PLUS, "gemma3": ONE_PLUS, "gemma3_text": ONE_PLUS,
}  # fmt: skip
SCALED_EMBEDDING = ("gemma", "gemma2", "gemma3", "gemma3_text")
"""Families whose model multiplies each embedding row by sqrt(H) before the first layer."""
UNSUPPORTED_SCALES = ("embedding_multiplier", "logits_scaling", "logit_scale")
"""Config keys of families that scale embeddings or logits in ways not carried here."""
PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
HEAD_BLOCK = 8192
"""Rows of a head of another dtype that are converted at once: 8,192 x 5,120 x 4 B = 160 MiB."""
STORED_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tables:
    """A target's embedding, final norm and head, ready to use."""

    embed: torch.Tensor
    """[V, H] embedding rows as stored, without `embedding_scale`."""

    head: torch.Tensor
    """[V, H] rows of the head; the same tensor as `embed` where the target ties them."""

    norm: torch.Tensor
    """[H] weight of the final norm, as stored (its meaning depends on `norm_form`)."""

    norm_form: str
    """"plain" or "one_plus"."""

    rms_norm_eps: float
    """Epsilon of the final norm."""

    embedding_scale: float
    """What the target multiplies an embedding row with before its first layer; 1.0 for most."""

    logit_softcap: float | None
    """c where the target's logits are c * tanh(logits / c), else None."""

    tied: bool
    """Whether embedding and head are one tensor."""

    facts: dict[str, Any]
    """What `write_tables` returned, read back."""

    def normalize(self, rows: torch.Tensor) -> torch.Tensor:
        """The final norm of raw residual rows [..., H], in float32."""
        wide = rows.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.rms_norm_eps)
        weight = self.norm.float()
        return unit * (weight + 1.0 if self.norm_form == ONE_PLUS else weight)

    def logits(self, rows: torch.Tensor, *, normed: bool = False) -> torch.Tensor:
        """float32 logits [N, V] of raw residual rows [N, H] (or of rows that passed the final norm, with `normed`).

        The product is a float32 one whatever the head is stored in (bfloat16 logits are 1/16 apart, and ties matter); a head
        of another dtype is converted a block at a time, so that a mapped one needs no room of its own.
        """
        return torch.cat(list(self.logit_blocks(rows, normed=normed)), dim=-1)

    def logit_blocks(self, rows: torch.Tensor, *, normed: bool = False) -> Iterator[torch.Tensor]:
        """`logits`, a block of the vocabulary at a time; one block where the head is float32 already."""
        ready = rows.float() if normed else self.normalize(rows)
        size = len(self.head) if self.head.dtype == torch.float32 else HEAD_BLOCK
        for start in range(0, len(self.head), size):
            logits = ready @ self.head[start : start + size].float().T
            yield logits if self.logit_softcap is None else self.logit_softcap * torch.tanh(logits / self.logit_softcap)


def write_tables(target_dir: Path, out_dir: Path) -> dict[str, Any]:
    """Copy the three tensors of `target_dir` to `out_dir`/tables.safetensors in their stored dtype; return the facts.

    Raises InputError for a directory or model that is not known, ConfigError for a config that cannot be followed,
    CheckpointError for damaged weights, StorageError where the file cannot be written.
    """
    config = read_config(target_dir)
    text = text_config(config)
    model_type = _known_model_type(config, text)
    places = {name: path for path in shard_paths(target_dir) for name in read_shard(path).tensors}
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in places and f"{p}norm.weight" in places), None)
    if prefix is None:
        looked = ", ".join(f"{p}embed_tokens.weight" for p in PREFIXES)
        raise InputError(
            f"{target_dir} holds no embedding with a final norm beside it; looked for {looked}, each with norm.weight.",
            "Give the target itself (not a drafter or an adapter), or add its tensor names to dflash_model/target/tables.py.",
        )
    embed = _read(places, f"{prefix}embed_tokens.weight")
    norm = _read(places, f"{prefix}norm.weight")
    head = _read_head(places, embed, tied_by_config=_tied_by_config(config, text))
    _check_shapes(embed, head, norm, hidden_size=text.get("hidden_size"))
    eps = text.get("rms_norm_eps")
    if not isinstance(eps, (int, float)) or eps <= 0:
        raise ConfigError(f"The target's rms_norm_eps is {eps!r}.", "Set rms_norm_eps in the target's config.json.")
    softcap = text.get("final_logit_softcapping")
    facts = {
        "model_type": model_type,
        "norm_form": NORM_FORMS[model_type],
        "rms_norm_eps": float(eps),
        "embedding_scale": math.sqrt(embed.shape[1]) if model_type in SCALED_EMBEDDING else 1.0,
        "logit_softcap": None if softcap is None else float(softcap),
        "tied": head is None,
        "vocab_rows": embed.shape[0],
        "hidden_size": embed.shape[1],
        "dtype": str(embed.dtype).removeprefix("torch."),
        "weights_digest": fingerprint(target_dir).weights_digest,
    }
    tensors = {"embed": embed, "norm": norm} | ({} if head is None else {"head": head})
    metadata = {"tables_version": TABLES_VERSION} | {name: "" if value is None else str(value) for name, value in facts.items()}
    write_tensors(out_dir / TABLES_NAME, tensors, metadata=metadata)
    return facts


def load_tables(directory: Path, dtype: torch.dtype | None = None, *, device: str = "cpu") -> Tables:
    """Read what `write_tables` wrote to `directory`, in `dtype` (None: as stored) on `device`.

    Raises ConfigError for float16, InputError where there is no such file, StorageError where it is damaged.
    """
    if dtype is not None and dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"Tables cannot be used in {dtype}.", "Use bfloat16 or float32; large activations overflow float16.")
    path = directory / TABLES_NAME
    tensors, metadata = read_tensors(path, kind="target tables")
    if metadata.get("tables_version") != TABLES_VERSION:
        raise StorageError(
            f"{path} has tables version {metadata.get('tables_version')}, expected {TABLES_VERSION}.",
            "Run the target_tables stage again.",
        )
    try:
        facts = _facts_from(metadata)
        embed, norm = (tensors[name].to(device=device, dtype=dtype or tensors[name].dtype) for name in ("embed", "norm"))
        head = embed if facts["tied"] else tensors["head"].to(device=device, dtype=dtype or tensors["head"].dtype)
    except (KeyError, ValueError) as exc:
        raise StorageError(f"{path} is damaged: {exc}.", "Delete it and run the target_tables stage again.") from exc
    return Tables(
        embed=embed,
        head=head,
        norm=norm,
        norm_form=facts["norm_form"],
        rms_norm_eps=facts["rms_norm_eps"],
        embedding_scale=facts["embedding_scale"],
        logit_softcap=facts["logit_softcap"],
        tied=facts["tied"],
        facts=facts,
    )


def _facts_from(metadata: dict[str, str]) -> dict[str, Any]:
    if metadata["norm_form"] not in (PLAIN, ONE_PLUS) or metadata["tied"] not in ("True", "False"):
        raise ValueError("unknown norm form or tie")
    numbers = {name: float(metadata[name]) for name in ("rms_norm_eps", "embedding_scale")}
    sizes = {name: int(metadata[name]) for name in ("vocab_rows", "hidden_size")}
    words = {name: metadata[name] for name in ("model_type", "norm_form", "dtype", "weights_digest")}
    softcap = float(metadata["logit_softcap"]) if metadata["logit_softcap"] else None
    return words | numbers | sizes | {"logit_softcap": softcap, "tied": metadata["tied"] == "True"}


def _known_model_type(config: dict[str, Any], text: dict[str, Any]) -> str:
    model_type = str(text.get("model_type") or config.get("model_type"))
    if model_type not in NORM_FORMS:
        raise InputError(
            f"The target's model_type {model_type!r} is not known, so the form of its final norm is not either.",
            f"Known: {', '.join(NORM_FORMS)}. Add the type to NORM_FORMS in dflash_model/target/tables.py once its norm is read.",
        )
    scaled = [key for key in UNSUPPORTED_SCALES if text.get(key) not in (None, 1, 1.0)]
    if scaled:
        raise ConfigError(
            f"The target's config sets {scaled[0]} = {text[scaled[0]]}, which the tables cannot carry.", "Use another target."
        )
    return model_type


def _tied_by_config(config: dict[str, Any], text: dict[str, Any]) -> bool | None:
    """What the config says of tying; None where it is silent, or where wrapper and text part disagree (the file decides)."""
    said = {bool(part["tie_word_embeddings"]) for part in (config, text) if part.get("tie_word_embeddings") is not None}
    return said.pop() if len(said) == 1 else None


def _read_head(places: dict[str, Path], embed: torch.Tensor, *, tied_by_config: bool | None) -> torch.Tensor | None:
    """The head's own tensor, or None where the embedding serves as head. Raises ConfigError where file and config disagree."""
    name = next((n for n in HEAD_NAMES if n in places), None)
    if name is None:
        if tied_by_config is False:
            raise InputError(
                f"The target's config does not tie its head to the embedding, but has none; looked for {', '.join(HEAD_NAMES)}.",
                "Copy the target again; a head left at random values would give meaningless logits.",
            )
        return None
    if name.replace(".weight", ".bias") in places:
        raise InputError("The target's head has a bias, which the tables cannot carry.", "Use another target.")
    head = _read(places, name)
    if torch.equal(head, embed):
        return None
    if tied_by_config:
        raise ConfigError(
            f"The target's config ties head and embedding, but {name} differs from the embedding.",
            "Set tie_word_embeddings to what the target was trained with.",
        )
    return head


def _read(places: dict[str, Path], name: str) -> torch.Tensor:
    path = places[name]
    try:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
    except OSError as exc:
        raise from_os_error(exc, f"reading {path}") from exc
    except SafetensorError as exc:
        raise CheckpointError(f"{name} cannot be read from {path}: {exc}.", "Copy the target's files again.") from exc
    if tensor.dtype not in STORED_DTYPES:
        raise CheckpointError(
            f"{name} is stored as {tensor.dtype}.", "Use a target whose embedding, norm and head are not quantised."
        )
    return tensor


def _check_shapes(embed: torch.Tensor, head: torch.Tensor | None, norm: torch.Tensor, *, hidden_size: Any) -> None:
    shapes = [tuple(embed.shape), tuple(head.shape) if head is not None else tuple(embed.shape), tuple(norm.shape)]
    consistent = embed.ndim == 2 and shapes[1] == shapes[0] and shapes[2] == (embed.shape[1],)
    if not consistent or hidden_size not in (None, embed.shape[1]):
        raise CheckpointError(
            f"Embedding {shapes[0]}, head {shapes[1]} and norm {shapes[2]} do not fit each other and hidden_size {hidden_size}.",
            "Copy the target again; its files are of different models.",
        )
