"""The error tree: exit codes, JSON, pickling, translation of OSError."""

import errno
import pickle

import pytest

from dflash_model import errors
from dflash_model.errors import EvalError, InputError, StorageError, from_json, from_os_error


def every_class(base: type[EvalError] = EvalError) -> list[type[EvalError]]:
    return [base, *(sub for child in base.__subclasses__() for sub in every_class(child))]


def test_the_docstring_draws_every_class() -> None:
    for cls in every_class():
        assert cls.__name__ in (errors.__doc__ or "")


def test_every_class_is_known_by_its_kind_and_kinds_are_unique() -> None:
    classes = every_class()
    assert len({cls.kind for cls in classes}) == len(classes)
    assert set(errors.BY_KIND.values()) == set(classes)


@pytest.mark.parametrize("cls", every_class())
def test_an_error_survives_json_and_pickle(cls: type[EvalError]) -> None:
    error = cls("It broke.", "Mend it.")
    for copy in (from_json(error.to_json()), pickle.loads(pickle.dumps(error))):
        assert type(copy) is cls
        assert (copy.problem, copy.fix) == ("It broke.", "Mend it.")
    assert str(error) == "It broke.\n  fix: Mend it."


def test_exit_codes_are_those_of_the_command_line() -> None:
    assert {cls.__name__: cls.exit_code for cls in every_class() if cls.exit_code != 3} == {
        "InputError": 2,
        "CheckpointError": 2,
        "ConfigError": 2,
        "SourceChanged": 2,
        "Regressed": 4,
        "NotEvaluable": 5,
        "Cancelled": 130,
    }


@pytest.mark.parametrize(
    ("number", "cls", "word"),
    [
        (errno.ENOSPC, StorageError, "No room"),
        (errno.EDQUOT, StorageError, "No room"),
        (errno.EACCES, StorageError, "Not allowed"),
        (errno.EROFS, StorageError, "Not allowed"),
        (errno.ENOENT, InputError, "Not found"),
        (errno.EISDIR, InputError, "A directory"),
        (errno.EIO, StorageError, "The system refused"),
    ],
)
def test_an_os_error_becomes_a_sentence(number: int, cls: type[EvalError], word: str) -> None:
    error = from_os_error(OSError(number, "reason", "/some/path"), "writing /some/path")
    assert type(error) is cls
    assert error.problem.startswith(word)
    assert "/some/path" in error.problem


def test_an_unknown_kind_becomes_a_stage_error() -> None:
    assert type(from_json({"kind": "from the future", "problem": "p"})) is errors.StageError
