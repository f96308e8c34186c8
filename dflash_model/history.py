"""The history of a home: an SQLite index of its finished evaluations. The directories are the truth, the index is a copy.

Each look first reconciles the two: evaluations that are new or changed are read, those that are gone are dropped. So an
index that was lost, damaged, or left behind by a killed run mends itself, and publishing the same run twice is one entry.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypeVar

from dflash_model.errors import InputError, StorageError
from dflash_model.evaluations import RESULT_FILE, RUN_FILE, EvaluatedDrafter, Evaluation, Ground, read_evaluation

log = logging.getLogger(__name__)
_T = TypeVar("_T")

INDEX_FILE = "history.sqlite"
INDEX_VERSION = 1
WAIT_S = 60.0
"""How long one writer waits for another."""

_TABLES = """
CREATE TABLE IF NOT EXISTS evaluations (
  run_id TEXT PRIMARY KEY, stamp TEXT NOT NULL, finished_at TEXT NOT NULL, headline TEXT NOT NULL,
  prompts INTEGER NOT NULL, ground TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS drafters (
  run_id TEXT NOT NULL REFERENCES evaluations ON DELETE CASCADE, position INTEGER NOT NULL, content TEXT NOT NULL,
  PRIMARY KEY (run_id, position));
CREATE TABLE IF NOT EXISTS unreadable (run_id TEXT PRIMARY KEY, stamp TEXT NOT NULL, problem TEXT NOT NULL);
"""


def evaluations(home: Path) -> list[Evaluation]:
    """All finished evaluations below `home`/runs, the oldest first. Raises StorageError where the index cannot be written."""

    def look(index: sqlite3.Connection) -> list[Evaluation]:
        _reconcile(index, home / "runs")
        return _read(index)

    return _with_index(home, look)


def unreadable(home: Path) -> dict[str, str]:
    """Run -> why its result cannot be read; as of the last `evaluations`."""
    return _with_index(
        home, lambda index: dict(index.execute("SELECT run_id, problem FROM unreadable ORDER BY run_id").fetchall())
    )


def _with_index(home: Path, use: Callable[[sqlite3.Connection], _T]) -> _T:
    """What `use` makes of the index; a damaged index is made anew from nothing, once."""
    path = home / INDEX_FILE
    try:
        with closing(_opened(path)) as index:
            return use(index)
    except sqlite3.OperationalError as exc:
        raise StorageError(
            f"The history {path} cannot be used: {exc}.", "Check the disk, and owner and mode of that file."
        ) from exc
    except sqlite3.DatabaseError as exc:
        log.warning("%s is damaged (%s); it is made again from the evaluations", path, exc)
        path.unlink(missing_ok=True)
        with closing(_opened(path)) as index:
            return use(index)


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    index = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
    try:
        index.execute("PRAGMA foreign_keys = ON")
        with _writing(index):
            if index.execute("PRAGMA user_version").fetchone()[0] != INDEX_VERSION:
                for name in ("drafters", "evaluations", "unreadable"):
                    index.execute(f"DROP TABLE IF EXISTS {name}")
                index.execute(f"PRAGMA user_version = {INDEX_VERSION}")
            for statement in _TABLES.split(";"):
                index.execute(statement)
    except sqlite3.DatabaseError:
        index.close()
        raise
    return index


@contextmanager
def _writing(index: sqlite3.Connection) -> Iterator[None]:
    """One transaction that no other writer can come between; rolled back where its body raises."""
    index.execute("BEGIN IMMEDIATE")
    with index:
        yield


def _reconcile(index: sqlite3.Connection, runs: Path) -> None:
    found = _stamps(runs)
    with _writing(index):
        known = dict(index.execute("SELECT run_id, stamp FROM evaluations UNION ALL SELECT run_id, stamp FROM unreadable"))
        for run_id in known.keys() - found.keys():
            _forget(index, run_id)
        for run_id in sorted(found):
            if known.get(run_id) != found[run_id]:
                _forget(index, run_id)
                _enter(index, runs / run_id, found[run_id])


def _stamps(runs: Path) -> dict[str, str]:
    """Run -> what changes when it is published again; `latest` and runs without a result are left out."""
    stamps = {}
    for directory in runs.glob("*/"):
        if directory.is_symlink():
            continue
        try:
            seen = [(directory / RESULT_FILE).stat()]
        except OSError:
            continue
        if (directory / RUN_FILE).is_file():
            seen.append((directory / RUN_FILE).stat())
        stamps[directory.name] = " ".join(f"{stat.st_mtime_ns}:{stat.st_size}" for stat in seen)
    return stamps


def _forget(index: sqlite3.Connection, run_id: str) -> None:
    for table in ("evaluations", "unreadable"):
        index.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))


def _enter(index: sqlite3.Connection, directory: Path, stamp: str) -> None:
    try:
        one = read_evaluation(directory)
    except InputError as exc:
        log.warning("history leaves out %s: %s", directory.name, exc.problem)
        index.execute("INSERT INTO unreadable VALUES (?, ?, ?)", (directory.name, stamp, exc.problem))
        return
    ground = json.dumps(asdict(one.ground), sort_keys=True)
    row = (one.run_id, stamp, one.finished_at, one.headline, one.prompts, ground)
    index.execute("INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?)", row)
    contents = [(one.run_id, number, json.dumps(asdict(drafter))) for number, drafter in enumerate(one.drafters)]
    index.executemany("INSERT INTO drafters VALUES (?, ?, ?)", contents)


def _read(index: sqlite3.Connection) -> list[Evaluation]:
    drafters: dict[str, list[EvaluatedDrafter]] = {}
    for run_id, content in index.execute("SELECT run_id, content FROM drafters ORDER BY run_id, position"):
        drafters.setdefault(run_id, []).append(_drafter(content))
    rows = index.execute("SELECT run_id, finished_at, headline, prompts, ground FROM evaluations ORDER BY finished_at, run_id")
    return [
        Evaluation(
            run_id=run_id,
            finished_at=finished_at,
            headline=headline,
            prompts=prompts,
            ground=Ground(**json.loads(ground)),
            drafters=tuple(drafters[run_id]),
        )
        for run_id, finished_at, headline, prompts, ground in rows
    ]


def _drafter(content: str) -> EvaluatedDrafter:
    values = json.loads(content)
    assert values.keys() == {field.name for field in fields(EvaluatedDrafter)}
    low_high = values["interval"]
    return EvaluatedDrafter(**values | {"interval": tuple(low_high) if low_high is not None else None})
