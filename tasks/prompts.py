"""Taking a prompt file into the relay's store, under a name made of its content."""

from __future__ import annotations

from pathlib import Path

from dflash_model.artifacts import Manifest
from dflash_model.digests import file_digest
from dflash_model.errors import StorageError
from dflash_model.storage import find_artifact, writing_artifact
from dflash_model.target.prompts import read_prompts
from tasks.remote.inventory import RELAY
from tasks.remote.site import Site

PROMPTS_FILE = "prompts.jsonl"


def prompts_key(path: Path) -> str:
    """Key of the artifact for this file's bytes. Raises InputError where it cannot be read or holds no valid prompts."""
    read_prompts(path)
    return f"prompts-v1-{file_digest(path)[:24]}"


def import_prompts(site: Site, path: Path) -> Manifest:
    """The prompts artifact of `path`, made if it is not there. Raises InputError naming file and line."""
    work_dir = Path(site.host(RELAY).work_dir)
    key = prompts_key(path)
    if find_artifact(work_dir, key) is None:
        prompts = read_prompts(path)
        categories = sorted({prompt.category for prompt in prompts if prompt.category is not None})
        with writing_artifact(work_dir, kind="prompts", key=key) as writer:
            (writer.path / PROMPTS_FILE).write_bytes(path.read_bytes())
            writer.facts |= {"count": len(prompts), "categories": categories}
    manifest = find_artifact(work_dir, key)
    if manifest is None:
        raise StorageError(f"{key} vanished from {work_dir}.", "Run again.")
    site.ledger.record(manifest, RELAY)
    return manifest
