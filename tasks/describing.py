"""Looking at a checkpoint where it lies: its index and config are read, its weights are not, and nothing is written there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from dflash_model.checkpoint.extract import ExtractPlan, plan_extraction
from dflash_model.checkpoint.open_table import open_directory_table, open_table
from dflash_model.checkpoint.step import step_of
from dflash_model.drafter.building import Reading
from dflash_model.drafter.description import FieldRow, describe, field_rows
from dflash_model.drafter.export import zlab_config
from dflash_model.drafter.geometry import geometry_of
from dflash_model.drafter.reading import GivenConfig, read_directory, read_training_file, tensors_of_plan
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.drafter.zlab import read_zlab
from dflash_model.errors import CheckpointError, InputError
from tasks.remote.drafters import read_config
from tasks.remote.host import FileFacts, Host
from tasks.remote.run_directories import CONFIG_NAME, checkpoints_in


@dataclass(frozen=True, kw_only=True, slots=True)
class LookedAt:
    """A checkpoint that was understood."""

    reading: Reading
    """Spec and warnings."""

    description: dict[str, Any]
    """As `dflash-eval describe --json` prints it."""

    @property
    def rows(self) -> list[FieldRow]:
        """The fields for people."""
        return field_rows(self.reading.spec)


def look_at(
    host: Host,
    pattern: str,
    *,
    config_host: Host,
    config: PurePosixPath | None = None,
    options: Mapping[str, Any] | None = None,
    state_key: str | None = None,
) -> LookedAt:
    """The newest checkpoint that matches `pattern` on `host`.

    For one without a config of its own: `config` on `config_host`, and `options` as for GivenConfig. Raises EvalError
    where it is nothing that is known, or nothing states what it needs.
    """
    given = GivenConfig(config=read_config(config_host, config) if config is not None else None, options=options or {})
    matches = sorted(host.glob(pattern), key=lambda facts: (facts.mtime_ns, facts.path), reverse=True)
    if not matches:
        raise CheckpointError(f"[{host.name}] nothing matches {pattern}.", "Check the path or pattern.")
    facts = checkpoints_in(host, matches[0])[0]
    with _planned(host, facts, state_key) as (plan, own, beside):
        tensors = tensors_of_plan(plan)
        if own is not None:
            _refuse_given(given, str(facts.path))
            reading = read_directory(tensors, own, beside=beside)
        else:
            reading = read_training_file(tensors, plan.facts, plan.state.dropped, given)
        step = step_of(plan.facts if own is None else {"step": own.get("training_step")})
        description = describe(reading, plan, path=str(facts.path), host=host.name, step=step)
    return LookedAt(reading=reading, description=description)


def _refuse_given(given: GivenConfig, path: str) -> None:
    """What would be passed over is refused: a directory's own config.json decides alone."""
    said = ["--config"] if given.config is not None else []
    said += [f"--{name.replace('_', '-')}" for name in given.options]
    if said:
        raise InputError(
            f"{path} has a {CONFIG_NAME} of its own, which {', '.join(said)} cannot change.",
            "Leave the option away, or correct the file.",
        )


@contextmanager
def _planned(
    host: Host, facts: FileFacts, state_key: str | None
) -> Iterator[tuple[ExtractPlan, dict[str, Any] | None, list[str]]]:
    """(what would be extracted, the config.json beside it if it is a drafter directory, the file names there)."""
    if not facts.is_dir:
        with host.open_source(facts.path) as source:
            yield plan_extraction(open_table(source), key=state_key), None, []
        return
    with host.open_directory(facts.path) as directory:
        names = directory.names()
        config = read_config(host, PurePosixPath(facts.path) / CONFIG_NAME) if CONFIG_NAME in names else None
        yield plan_extraction(open_directory_table(directory), key=state_key, keep_vocab=config is not None), config, names


def writable_config(spec: DrafterSpec) -> dict[str, Any]:
    """A config.json in z-lab's form that its reader reads back to this spec. Raises ConfigError where that form cannot say it."""
    config = zlab_config(spec)
    back = read_zlab(config, geometry_of(spec).tensor_shapes()).spec
    assert replace(back, source_format=spec.source_format, provenance=spec.provenance) == spec
    return config
