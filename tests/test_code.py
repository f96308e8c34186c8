"""The shipped code: what is in it, that its name is its content, and that it lands once, whole, whoever comes first."""

import io
import subprocess
import sys
import threading
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import dflash_model
from dflash_model.errors import HostError
from tasks.remote.code import CodeArchive, ensure_code, pack_code
from tests.local_shell import LocalShell

SOURCE = Path(dflash_model.__file__).parent


def names(archive: CodeArchive) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(archive.content)).namelist()


def small_archive(text: str) -> CodeArchive:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("dflash_model/__init__.py"), text)
    return CodeArchive(content=buffer.getvalue())


def test_the_archive_holds_the_package_and_its_data_only() -> None:
    found = names(pack_code())
    modules = {f"dflash_model/{path.relative_to(SOURCE).as_posix()}" for path in SOURCE.rglob("*.py")}
    data = {"dflash_model/py.typed", "dflash_model/report.html.j2", "dflash_model/result.schema.json"}
    assert modules < set(found)
    assert data < set(found)
    assert not [name for name in found if not name.startswith("dflash_model/") or "__pycache__" in name]
    assert len(pack_code().content) < 2_000_000


def test_the_same_source_gives_the_same_bytes_and_other_source_another_name() -> None:
    assert pack_code.__wrapped__().content == pack_code.__wrapped__().content
    assert names(pack_code()) == sorted(names(pack_code()))
    assert small_archive("a = 1").digest == small_archive("a = 1").digest
    assert small_archive("a = 1").digest != small_archive("a = 2").digest


def test_the_unpacked_code_can_be_imported_without_anything_installed(tmp_path: Path) -> None:
    directory = ensure_code(LocalShell(), pack_code(), work_dir=PurePosixPath(tmp_path), python=sys.executable)
    code = f"import sys; sys.path.insert(0, {str(directory)!r}); import dflash_model.stages.registry as r; print(r.__file__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == Path(directory) / "dflash_model" / "stages" / "registry.py"


def test_code_that_is_there_is_not_sent_again(tmp_path: Path) -> None:
    shell = LocalShell()
    for _ in range(2):
        ensure_code(shell, small_archive("a = 1"), work_dir=PurePosixPath(tmp_path), python=sys.executable)
    assert len(shell.written) == 1
    ensure_code(shell, small_archive("a = 2"), work_dir=PurePosixPath(tmp_path), python=sys.executable)
    assert len(shell.written) == 2


def test_first_uses_at_the_same_time_end_with_one_copy(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    class Meeting(LocalShell):
        def write_small(self, path: PurePosixPath, content: bytes) -> None:
            together.wait(timeout=10)
            super().write_small(path, content)

    shell, found = Meeting(), []

    def one() -> None:
        found.append(ensure_code(shell, small_archive("a = 1"), work_dir=PurePosixPath(tmp_path), python=sys.executable))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(shell.written) == 4, "all of them found nothing there"
    assert set(found) == {PurePosixPath(tmp_path) / "code" / small_archive("a = 1").digest}
    assert len(found) == 4
    assert [path.name for path in (tmp_path / "code").iterdir()] == [found[0].name]
    assert (Path(found[0]) / "dflash_model" / "__init__.py").read_text() == "a = 1"


@pytest.mark.parametrize(
    ("python", "archive", "reason"),
    [
        ("/none/python", small_archive("a = 1"), "/none/python could not unpack the code in"),
        (sys.executable, CodeArchive(content=b"no zip"), "BadZipFile: File is not a zip file"),
    ],
)
def test_code_that_cannot_be_unpacked_is_a_host_error_and_leaves_nothing(
    tmp_path: Path, python: str, archive: CodeArchive, reason: str
) -> None:
    with pytest.raises(HostError) as caught:
        ensure_code(LocalShell(), archive, work_dir=PurePosixPath(tmp_path), python=python)
    assert reason in caught.value.problem
    assert list((tmp_path / "code").iterdir()) == []
