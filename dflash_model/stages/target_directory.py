"""The target's directory on the host that runs a stage, checked to be the target that the run means."""

from __future__ import annotations

from pathlib import Path

from dflash_model.errors import InputError
from dflash_model.stages.protocol import Context
from dflash_model.target.fingerprint import fingerprint


def target_directory(context: Context) -> Path:
    """Where the target lies on this host: `local.target_path`, or the hub's snapshot of `local.hub_id` at `local.revision`.

    Raises InputError where its files are not those that the run identified.
    """
    local = context.local
    directory = Path(local["target_path"]) if "target_path" in local else fetch_from_hub(local["hub_id"], local["revision"])
    wanted = context.input_manifest("target").facts["fingerprint"]
    if fingerprint(directory).digest != wanted:
        raise InputError(
            f"{directory} is not the target that this run identified: its files differ.",
            "If they have just changed, run again; the target is identified anew. Every host must hold the same target.",
        )
    return directory


def fetch_from_hub(hub_id: str, revision: str) -> Path:
    """The local snapshot of a hub repository, fetched where it is not there yet. Raises InputError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError, ValueError) as exc:
        reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
        raise InputError(
            f"The target {hub_id} at {revision} cannot be fetched: {reason}.",
            "Check the id, the revision and HF_TOKEN on that host, or copy the model there and give its directory.",
        ) from exc
