"""From a trainer's checkpoint to the drafter's state dict: which dict, which prefixes go, which tensors are not the drafter's.

Everything left out is said with its reason, and nothing is guessed: two dicts that could be meant, or two tensors that
would get one name, are an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from dflash_model.checkpoint.table import Entry, TensorTable
from dflash_model.checkpoint.tensor_names import REDUCED_HEAD, VOCABULARY_MAP, clean_names, drop_reason, looks_like_drafter
from dflash_model.checkpoint.torch_tensor import PathKey, Refusal
from dflash_model.errors import CheckpointError

STATE_DICT_KEYS = ("model_state_dict", "draft_state_dict", "state_dict", "model", "module")
"""Keys under which trainers keep the drafter's state dict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDict(Generic[Entry]):
    """The drafter's tensors in a checkpoint, under the names that a drafter's own file would use."""

    tensors: dict[str, Entry]
    """Clean name -> tensor, sorted by name."""

    key_path: str
    """Dotted path of the dict that was taken; "" for the top level."""

    prefixes: tuple[str, ...]
    """Prefixes that were stripped, in order."""

    renamed: dict[str, str]
    """Clean name -> name in the file (below `key_path`), where the two differ by more than prefixes."""

    dropped: dict[str, str]
    """Name in the file (below `key_path`) -> why the tensor was left out."""


def select_state_dict(file: TensorTable[Entry], key: str | None = None, *, keep_vocab: bool = False) -> StateDict[Entry]:
    """Find the drafter's tensors. `key` is a dotted path, "" the top level; None looks for one of STATE_DICT_KEYS.

    `keep_vocab` keeps embedding, head and vocabulary maps. A head with a map is kept in any case: the target's could not
    stand in for it. Rotary buffers and the verifier's copies go in any case.
    Raises CheckpointError where no dict or several could be meant, where two tensors would share a name, and where a
    wanted tensor cannot be read (sparse, quantized, DTensor, whole module, ...).
    """
    paths = [*file.by_path(), *file.refused()]
    if () in file.refused():
        _readable(file, ())
    key_path = ".".join(_find_unnamed(file.name, paths)) if key is None else key
    inside, dropped = _inside(file, paths, key_path)
    names = clean_names(list(inside), file.name)
    reduced = VOCABULARY_MAP in names.clean.values()
    kept: dict[str, Entry] = {}
    origins: dict[str, str] = {}
    for raw, path in inside.items():
        clean = names.clean[raw]
        reason = drop_reason(clean, keep_vocab=keep_vocab or (reduced and clean in REDUCED_HEAD))
        if reason is not None:
            dropped[raw] = reason
            continue
        _refuse_duplicate(origins, clean, raw=raw, file_name=file.name)
        kept[clean] = _readable(file, path)
    if not kept:
        raise CheckpointError(
            f"{file.name} holds no drafter tensors under {_shown(key_path)}: all {len(dropped)} are of other kinds.",
            "Give the key of the drafter's state dict.",
        )
    return StateDict(
        tensors=dict(sorted(kept.items())),
        key_path=key_path,
        prefixes=names.prefixes,
        renamed={clean: raw for clean, raw in sorted(origins.items()) if raw in names.renamed},
        dropped=dropped,
    )


def _find_unnamed(file_name: str, paths: list[PathKey]) -> PathKey:
    """The path of the one dict that could be the drafter's, unwrapping dicts in dicts."""
    chosen: PathKey = ()
    while True:
        below = [path[len(chosen) :] for path in paths if path[: len(chosen)] == chosen]
        direct = [path[0] for path in below if len(path) == 1]
        candidates = [name for name in STATE_DICT_KEYS if any(path[0] == name for path in below if path)]
        if looks_like_drafter(direct):
            candidates = ["", *[name for name in candidates if name not in direct]]
        if len(candidates) > 1:
            raise _ambiguous(file_name, [".".join((*chosen, name)) if name else ".".join(chosen) for name in candidates])
        if not candidates:
            # A refused leaf (a whole module) under one of the keys ends here too, and is named when it is read.
            if direct or chosen:
                return chosen
            raise _nothing_known(file_name, below)
        if candidates == [""]:
            return chosen
        chosen = (*chosen, candidates[0])


def _inside(file: TensorTable[Entry], paths: list[PathKey], key_path: str) -> tuple[dict[str, PathKey], dict[str, str]]:
    """(name below the chosen dict -> path, name -> why it is left out). The key may also be a prefix of flat names.

    Where the dict holds tensors directly, dicts inside it are something else (another copy, an optimizer).
    """
    below = [(path, rest) for path in paths if (rest := _below(path, key_path)) is not None]
    if any(rest == () for _, rest in below):
        _readable(file, next(path for path, rest in below if rest == ()))
    direct = any(len(rest) == 1 for _, rest in below)
    inside: dict[str, PathKey] = {}
    dropped: dict[str, str] = {}
    for path, rest in below:
        name = ".".join(rest)
        if direct and len(rest) > 1:
            if key_path:
                dropped[name] = "in a dict beside the state dict's own tensors"
        elif name in inside:
            raise CheckpointError(f"{file.name} holds two tensors called {name}.", "Save the checkpoint with distinct keys.")
        elif rest:
            inside[name] = path
    if not inside:
        raise CheckpointError(
            f"{file.name} holds no tensors under {_shown(key_path)}.",
            f"Its top-level keys with tensors are {_tops(paths)}; give one of them.",
        )
    return inside, dropped


def _below(path: PathKey, key_path: str) -> PathKey | None:
    """The part of `path` below the dotted key, None where it is elsewhere."""
    if not key_path:
        return path
    full = ".".join(path)
    if full != key_path and not full.startswith(key_path + "."):
        return None
    length = -1
    for depth, part in enumerate(path, start=1):
        length += 1 + len(part)
        if length == len(key_path):
            return path[depth:]
    return (full[len(key_path) + 1 :],)


def _readable(file: TensorTable[Entry], path: PathKey) -> Entry:
    refusal: Refusal | None = file.refused().get(path)
    if refusal is not None:
        name = ".".join(path) or "The only object"
        raise CheckpointError(f"{name} in {file.name} {refusal.reason}.", refusal.fix)
    return file.by_path()[path]


def _refuse_duplicate(origins: dict[str, str], clean: str, *, raw: str, file_name: str) -> None:
    other = origins.setdefault(clean, raw)
    if other != raw:
        raise CheckpointError(
            f"{file_name} holds both {other} and {raw}, which would both be called {clean}.",
            "Save one state dict without doubled prefixes, or give the key of the right one.",
        )


def _ambiguous(name: str, candidates: list[str]) -> CheckpointError:
    listed = ", ".join(_shown(candidate) for candidate in candidates)
    return CheckpointError(f"{name} holds several dicts that could be the drafter's: {listed}.", "Give the key of the right one.")


def _nothing_known(name: str, paths: list[PathKey]) -> CheckpointError:
    if not any(paths):
        return CheckpointError(f"{name} holds no tensors.", "Give a checkpoint of a drafter.")
    return CheckpointError(
        f"{name} keeps no tensors at its top level or under {', '.join(STATE_DICT_KEYS)}.",
        f"Its top-level keys with tensors are {_tops(paths)}; give the key of the drafter's state dict.",
    )


def _tops(paths: list[PathKey]) -> str:
    tops = list(dict.fromkeys(path[0] for path in paths if path))
    shown = ", ".join(top[:80] for top in tops[:20])
    return f"{shown} and {len(tops) - 20} more" if len(tops) > 20 else shown or "none"


def _shown(key: str | None) -> str:
    return key or "the top level"
