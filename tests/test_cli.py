"""The command line: each bad input gets its sentence, a fix and its exit code, without a trace; `--plan` does nothing."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_model.checkpoint.extract import extract_weights
from dflash_model.checkpoint.source import LocalFile
from flows.cli import main
from flows.parameters import DrafterSource, EvaluateParameters, TargetSource

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "deployments" / "demo"


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Commands set Prefect's variables; put back what was there."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def arguments(tmp_path: Path, **changes: str | None) -> list[str]:
    chosen: dict[str, str | None] = {
        "--home": str(tmp_path / "home"),
        "--target": str(DEMO / "target"),
        "--reference": str(DEMO / "drafters" / "step-00220"),
        "--candidate": str(DEMO / "drafters" / "step-00055"),
        "--prompts": str(DEMO / "prompts.jsonl"),
    }
    chosen |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return ["run", *(word for name, value in chosen.items() if value is not None for word in (name, value)), "--plan"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train") / "step-00055.pt"
    command = [
        sys.executable,
        str(DEMO / "make_checkpoints.py"),
        str(DEMO / "drafters" / "step-00055"),
        str(path),
        "--step",
        "55",
    ]
    subprocess.run(command, check=True)
    return path


def test_a_plan_says_what_would_run_and_leaves_nothing_but_the_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path)) == 0
    out = capsys.readouterr().out
    for stage in ("identify target", "extract step-00220", "references", "hidden states", "replay step-00055", "compare"):
        assert stage in out
    assert "Nothing was done." in out
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_plan_counts_what_a_relay_would_move(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts.yaml").write_text(
        "hosts:\n  t: {work_dir: t, roles: [train]}\n  e: {work_dir: e, roles: [eval, target]}\n"
    )
    given = arguments(
        tmp_path, hosts=str(tmp_path / "hosts.yaml"), candidate=f"t:{checkpoint}", reference=f"e:{DEMO}/drafters/step-00220"
    )
    assert main(given) == 0
    out = capsys.readouterr().out
    assert "t -> e" in out
    # The drafter alone moves, neither its moments nor the target's tables: what a local extraction would write.
    with LocalFile(checkpoint) as source:
        size = extract_weights(source, tmp_path / "local").bytes_written
    assert f"Would move {size / 1e6:.1f} MB" in out
    assert size < 0.4 * checkpoint.stat().st_size


def bad_file(tmp_path: Path, name: str, content: bytes) -> str:
    (tmp_path / name).write_bytes(content)
    return str(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "content", "sentence"),
    [
        ("candidate", None, "nothing matches"),
        ("candidate", b"", "is empty"),
        ("candidate", b"hello, world", "is no torch.save file"),
        ("prompts", None, "Not found while reading the prompts"),
        ("prompts", b"", "holds no prompts"),
        ("prompts", b'{"prompt": "a"}\n{"prompt": "b"', ":2:"),
        ("prompts", b'{"id": "a", "category": "x"}', ":1:"),
        ("prompts", b'{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}', "was used on line 1"),
        ("prompts", b"\xff\xfe", "is not UTF-8"),
        ("target", None, "is not a directory"),
        ("hosts", None, "Not found while reading the inventory"),
        ("hosts", b"hosts: [", "is not YAML"),
        ("config", b"{", "is not JSON"),
    ],
)
def test_each_bad_file_gets_its_sentence(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], change: str, content: bytes | None, sentence: str
) -> None:
    path = bad_file(tmp_path, "bad", content) if content is not None else str(tmp_path / "none")
    given = {"candidate": str(checkpoint)} | {change: path}
    assert main(arguments(tmp_path, **given)) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert "\n  fix: " in captured.err
    assert "Traceback" not in captured.err


def test_a_truncated_checkpoint_is_not_taken_for_whole(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = bad_file(tmp_path, "cut.pt", checkpoint.read_bytes()[:1_000_000])
    assert main(arguments(tmp_path, candidate=cut)) == 2
    assert "no zip end record" in capsys.readouterr().err


def test_the_newest_complete_checkpoint_is_chosen(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, (name, content) in enumerate([("a.pt", checkpoint.read_bytes()), ("b.pt", checkpoint.read_bytes()[:-100])]):
        path = Path(bad_file(tmp_path, name, content))
        os.utime(path, ns=((age + 1) * 10**18, (age + 1) * 10**18))
    assert main(arguments(tmp_path, candidate=str(tmp_path / "*.pt"))) == 0
    out = capsys.readouterr().out
    assert "replay a " in out
    assert "replay b " not in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run"], "required"),
        (
            ["run", "--candidate", "x", "--target", "t", "--prompts", "p", "--target-layer-ids", "1,x"],
            "not a list of whole numbers",
        ),
        (["nonsense"], "invalid choice"),
        ([], "required"),
    ],
)
def test_wrong_words_are_usage_errors(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_hub_id_without_revision_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path, target="hf:Qwen/Qwen3-8B")) == 2
    assert "needs a `revision`" in capsys.readouterr().err


def test_rerun_of_an_unknown_run_names_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "request.json").write_text("{}")
    assert main(["rerun", "two", "--home", str(tmp_path)]) == 2
    assert "Name one of: one." in capsys.readouterr().err


def test_help_answers_without_loading_anything_heavy() -> None:
    code = "import sys; from flows.cli import main\ntry:\n    main(['run', '--help'])\nexcept SystemExit:\n    pass\n"
    code += "sys.exit(','.join(m for m in ('torch', 'prefect', 'transformers', 'pydantic') if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--config-from" in done.stdout


def test_rerun_reads_a_run_s_parameters_before_prefect_is_imported(tmp_path: Path) -> None:
    """Prefect takes its settings when it is imported: earlier, the run's own server would go unused."""
    given = EvaluateParameters(candidates=[DrafterSource(path="/c")], target=TargetSource(path="/t"), prompts="/p")
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "request.json").write_text(given.model_dump_json())
    code = (
        "import sys\nfrom argparse import Namespace\nfrom pathlib import Path\nfrom flows.running import parameters_of_run\n"
        "options = Namespace(run_name='r', redo_from=None, failover=True, place=[('hidden-states', ['gpu-b'])])\n"
        "print(parameters_of_run(Path(sys.argv[1]), options).placement, 'prefect' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "{'hidden-states': ['gpu-b']} False\n"
