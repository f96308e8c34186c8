"""What an extraction is told besides the file: the config of a bare state dict, from wherever the user said it comes."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from dflash_model.checkpoint.extract import Cast
from dflash_model.errors import InputError
from tasks.remote.drafters import DIRECTORY, RemoteDrafter, read_config
from tasks.remote.inventory import RELAY
from tasks.remote.selection import Selection
from tasks.remote.site import Site

OPTIONS = ("mask_token_id", "target_layer_ids", "block_size", "rope_theta", "rms_norm_eps")


def selection_of(remote: RemoteDrafter, bare: dict[str, Any], *, cast: Cast) -> Selection:
    """What is taken out of one drafter's checkpoint.

    A directory with a config holds one state dict, so no key is needed, and what it holds is the drafter's own; a training
    state also carries the target's frozen tables.
    """
    if remote.form == DIRECTORY:
        return Selection(cast=cast, keep_vocab=True)
    return Selection(state_key=bare["state_key"], cast=cast)


def extract_parameters(
    remote: RemoteDrafter,
    bare: dict[str, Any],
    site: Site,
    reference_facts: dict[str, Any] | None,
    *,
    role: str,
    selection: Selection,
) -> dict[str, Any] | None:
    """Parameters of extract-weights for one drafter; None where they wait for a reference that is not extracted yet.

    `bare` has the fields of flows.parameters.BareConfig; it speaks of checkpoints without a config only. Raises InputError.
    """
    common: dict[str, Any] = {
        "source_digest": remote.digest,
        "form": remote.form,
        "tokenizer_sha256": remote.tokenizer_sha256,
    }
    if selection.cast != "keep":
        common["cast"] = selection.cast
    if remote.form == DIRECTORY:
        return common
    config_from: dict[str, Any] | None = None
    if bare["config_from_reference"]:
        if role == "reference":
            raise InputError(
                f"The reference {remote.name} is a bare .pt and cannot take its config from itself.",
                "Give a reference directory, or --config.",
            )
        if reference_facts is None:
            return None
        config_from = reference_facts["spec"]
    config = None
    if bare["config_path"] is not None:
        config = read_config(site.host(RELAY), PurePosixPath(Path(bare["config_path"]).expanduser().absolute()))
    options = {name: bare[name] for name in OPTIONS if bare[name] is not None}
    return common | {"state_key": selection.state_key, "config": config, "config_from": config_from, "options": options}
