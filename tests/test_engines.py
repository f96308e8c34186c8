"""Serving engines over real HTTP: each protocol gives the target's own greedy tokens, each fault its one sentence."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_model.engines.access import ServerAccess
from dflash_model.engines.answer import Answer, Refusal
from dflash_model.engines.client import JsonClient
from dflash_model.engines.identity import ARCHITECTURE, CANARY_TEXT, CANARY_TOKENS, FILES, NAME, NOTHING, Canary, served_as_target
from dflash_model.engines.opening import open_engine
from dflash_model.engines.session import Session, Wish
from dflash_model.errors import EvalError, HostBusy, InputError, StageError
from dflash_model.target.backbone import Backbone, load_backbone
from dflash_model.target.greedy import generate_reference
from dflash_model.target.prompts import RenderedPrompt, load_tokenizer, read_prompts, render
from dflash_model.target.references import Reference
from dflash_model.target.sample_store import SampleStore
from tests.engine_server import EngineServer, Greedy, serving
from tests.tiny_targets import DEMO_PROMPTS, DEMO_TARGET

LIMIT, OVERSHOOT, STOP_ID = 22, 3, 2
PROTOCOLS = ("sglang", "openai", "openai-text")


@pytest.fixture(scope="module")
def target() -> Backbone:
    return load_backbone(DEMO_TARGET, dtype="float32")


@pytest.fixture(scope="module")
def greedy(target: Backbone, tokenizer: Any, prompts: list[RenderedPrompt]) -> Greedy:
    """The target; what every session asks is computed beforehand, so that no test waits for it."""
    made = Greedy(target.model)
    made.go_on(tokenizer(CANARY_TEXT)["input_ids"], CANARY_TOKENS)
    made.go_on(prompts[0].token_ids, LIMIT)
    return made


@pytest.fixture(scope="module")
def other_greedy(target: Backbone) -> Greedy:
    """Another model behind the same name: the target with a few disturbed weights."""
    model = copy.deepcopy(target.model)
    torch.manual_seed(0)
    with torch.no_grad():
        model.lm_head.weight.add_(0.2 * torch.randn_like(model.lm_head.weight))
    return Greedy(model)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO_TARGET)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[RenderedPrompt]:
    """Two answers that stop within the limit, two that run into it."""
    chosen = {prompt.id: prompt for prompt in read_prompts(DEMO_PROMPTS)}
    ids = ("code-3", "unlike-1", "count-1", "story-1")
    return render([chosen[name] for name in ids], tokenizer, thinking=None, max_prompt_tokens=200)


@pytest.fixture(scope="module")
def expected(target: Backbone, prompts: list[RenderedPrompt]) -> dict[str, Reference]:
    """By transformers in process."""
    made = [
        generate_reference(target, prompt, stop_ids=(STOP_ID,), max_new_tokens=LIMIT, overshoot_tokens=OVERSHOOT)
        for prompt in prompts
    ]
    return {reference.sample_id: reference for reference in made}


@pytest.fixture
def server(greedy: Greedy, tokenizer: Any) -> Iterator[EngineServer]:
    with serving(EngineServer(greedy, tokenizer, model_path=str(DEMO_TARGET))) as running:
        yield running


class Asker:
    """A session against the double, with short patience."""

    def __init__(self, server: EngineServer, tokenizer: Any, directory: Path, protocol: str = "sglang", **access: Any) -> None:
        settings: dict[str, Any] = {"concurrency": 1, "timeout_s": 60.0, "retries": 2}
        self.client = JsonClient(ServerAccess(url=server.url, **(settings | access)), backoff_s=0.01)
        self.engine = open_engine(protocol, self.client, tokenizer, stop_ids=(STOP_ID,))
        self.store = SampleStore(directory, lambda prompt: f"{protocol}-{hash(prompt.token_ids):x}")
        self.session = Session(
            self.engine,
            self.store,
            tokenizer,
            Wish(max_new_tokens=LIMIT, overshoot_tokens=OVERSHOOT, max_positions=4096),
            accept=lambda identity: served_as_target(identity, DEMO_TARGET, hub_id=None),
            concurrency=self.client.access.concurrency,
            on_progress=lambda done, total: None,
        )

    def __call__(self, prompts: list[RenderedPrompt]) -> list[Any]:
        return self.session.answers(prompts)


@pytest.fixture
def asker(server: EngineServer, tokenizer: Any, tmp_path: Path) -> Callable[..., Asker]:
    return lambda protocol="sglang", **access: Asker(server, tokenizer, tmp_path, protocol, **access)


def tokens(reference: Reference) -> tuple[Any, ...]:
    return reference.prompt_ids, reference.completion_ids, reference.overshoot_ids, reference.finish


@pytest.mark.parametrize("protocol", ["sglang", "openai"])
def test_engines_with_token_ids_give_what_transformers_gives(
    asker: Callable[..., Asker],
    prompts: list[RenderedPrompt],
    expected: dict[str, Reference],
    server: EngineServer,
    protocol: str,
) -> None:
    answers = asker(protocol, concurrency=3)(prompts)
    assert [tokens(answer) for answer in answers] == [tokens(expected[answer.sample_id]) for answer in answers]
    assert {answer.finish for answer in answers} == {"stop", "length"}
    for answer in answers:
        assert answer.logprobs == pytest.approx(expected[answer.sample_id].logprobs, abs=1e-4)
        assert (answer.engine, answer.token_source, len(answer.overshoot_ids)) == (protocol, "ids", OVERSHOOT)
    natural = [one for one in server.asked if not (one.get("ignore_eos") or one.get("sampling_params", {}).get("ignore_eos"))]
    assert len(natural) == len(prompts)
    for one in server.asked:
        assert (one.get("sampling_params") or one)["temperature"] == 0.0
        assert (one.get("sampling_params") or one)["repetition_penalty"] == 1.0
    assert all((one.get("sampling_params") or one)["stop_token_ids"] == [STOP_ID] for one in natural)


def test_a_server_of_text_gives_the_same_tokens_and_nothing_past_the_end(
    asker: Callable[..., Asker], prompts: list[RenderedPrompt], expected: dict[str, Reference]
) -> None:
    for answer in asker("openai-text")(prompts):
        wanted = expected[answer.sample_id]
        assert (answer.completion_ids, answer.finish) == (wanted.completion_ids, wanted.finish)
        assert (answer.overshoot_ids, answer.logprobs, answer.token_source) == ((), None, "text")


@pytest.mark.parametrize(
    ("text", "counted", "finish", "reason"),
    [
        ("abc", None, "length", "it ended by its limit"),
        ("abc", 12, "stop", "the server counts 12 tokens"),
        ("<|im_end|>x", None, "stop", "holds a stop token"),
        ("a\ufffd\ufffd", None, "stop", None),
    ],
)
def test_a_text_whose_tokens_are_not_certain_is_refused_with_the_reason(
    asker: Callable[..., Asker],
    server: EngineServer,
    prompts: list[RenderedPrompt],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    counted: int | None,
    finish: str,
    reason: str | None,
) -> None:
    engine = asker("openai-text").engine
    said = {"choices": [{"text": text, "finish_reason": finish}], "usage": {"completion_tokens": counted} if counted else None}
    monkeypatch.setattr(engine, "_choice", lambda *args, **kwargs: (said["choices"][0], said))  # type: ignore[index]
    answer = engine.ask(prompts[0], max_new_tokens=LIMIT)
    if reason is None:
        assert isinstance(answer, Answer)
        assert answer.token_ids[-1] == STOP_ID
    else:
        assert isinstance(answer, Refusal)
        assert reason in answer.reason


def test_a_text_that_the_tokenizer_does_not_give_back_is_refused(
    asker: Callable[..., Asker], prompts: list[RenderedPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = asker("openai-text")
    monkeypatch.setattr(asking.engine, "_tokenizer", _Lossy(asking.engine._tokenizer))  # type: ignore[attr-defined]
    answers = asking([prompts[0], prompts[2]])
    assert answers == ["its text, tokenised and decoded again, is another one"] * 2
    # A refusal is kept like an answer: it is not asked for again.
    before = len(asking.client.sent)
    assert asking([prompts[0]]) == answers[:1]
    assert len(asking.client.sent) == before


class _Lossy:
    """A tokenizer that loses double letters on the way back."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        return str(self._tokenizer.decode(ids, **options)).replace(" ", "  ")


def test_another_tokenizer_on_a_server_of_text_shows_in_its_count_of_prompt_tokens(
    asker: Callable[..., Asker], server: EngineServer, prompts: list[RenderedPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "tokenizer", _Shorter(server.tokenizer))
    assert "the server reads its prompt as" in str(asker("openai-text").engine.ask(prompts[0], max_new_tokens=LIMIT))


class _Shorter(_Lossy):
    def __call__(self, text: str, **options: Any) -> Any:
        return {"input_ids": self._tokenizer(text, **options)["input_ids"][1:]}


@pytest.mark.parametrize(
    ("protocol", "fault"),
    [
        *(
            (protocol, fault)
            for protocol in ("sglang", "openai")
            for fault in ("503", "429", "502", "drop", "cut", "prompt tail")
        ),
        ("sglang", "no stop token"),
    ],
)
def test_what_can_be_mended_is_mended(
    asker: Callable[..., Asker],
    server: EngineServer,
    prompts: list[RenderedPrompt],
    expected: dict[str, Reference],
    protocol: str,
    fault: str,
) -> None:
    server.faults.append(fault)
    (answer,) = asker(protocol)(prompts[:1])
    assert tokens(answer) == tokens(expected[answer.sample_id])
    tries = 2 if fault in ("503", "429", "502", "drop", "cut") else 1
    assert server.counts["completion"] == tries


@pytest.mark.parametrize("protocol", ["sglang", "openai"])
@pytest.mark.parametrize(
    ("faults", "cls", "sentence"),
    [
        (["503"] * 3, HostBusy, r"is busy: 503 to /\S+ after 3 tries\."),
        (["drop"] * 3, HostBusy, r"cut the connection after 3 tries\."),
        (["cut"] * 3, HostBusy, r"cut the connection after 3 tries\."),
        (["hang"], StageError, r"did not answer /\S+ within 1\.5 s\."),
        (["rubbish"], StageError, r"with 200 and something that is no JSON object: '<html>Bad gateway</html>'\."),
        (["list"], StageError, r"with 200 and something that is no JSON object"),
        (["500"], StageError, r"answered 500 to /"),
        (["400"], InputError, r"refuses the request to /\S+ \(400\): '{\"error\": \"not now\"}'\."),
        (["no ids"], StageError, r"gave no token ids for prompt code-3\."),
        (["foreign id"], StageError, r"gave the token id 100000 for prompt code-3; the target's vocabulary ends at 511\."),
        (["miscounted"], StageError, r"gave \d+ token ids for prompt code-3 and counts \d+\."),
        (["truncated prompt"], StageError, r"read prompt code-3 as "),
        (["other text"], StageError, r"reads its own tokens for prompt code-3 as '\?'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_each_fault_ends_in_its_one_sentence(
    asker: Callable[..., Asker],
    server: EngineServer,
    prompts: list[RenderedPrompt],
    protocol: str,
    faults: list[str],
    cls: type[EvalError],
    sentence: str,
) -> None:
    asking = asker(protocol, timeout_s=1.5) if faults == ["hang"] else asker(protocol)
    server.faults.extend(faults)
    with pytest.raises(cls, match=sentence) as caught:
        asking(prompts[:1])
    assert type(caught.value) is cls
    assert caught.value.fix
    assert "\n" not in caught.value.problem


def test_sglang_without_output_ids_is_read_from_its_log_probabilities(
    asker: Callable[..., Asker], server: EngineServer, prompts: list[RenderedPrompt], expected: dict[str, Reference]
) -> None:
    server.faults.append("none")
    (answer,) = asker()(prompts[:1])
    assert tokens(answer) == tokens(expected[answer.sample_id])


def test_a_stop_token_of_the_servers_own_is_refused_and_a_missing_one_is_found_by_us(
    asker: Callable[..., Asker], server: EngineServer, prompts: list[RenderedPrompt], expected: dict[str, Reference]
) -> None:
    wanted = expected["count-1"]
    server.own_stops = [wanted.completion_ids[4]]
    with pytest.raises(StageError, match=r"stopped the answer to prompt count-1 at \d+, which is no stop token of the target"):
        asker()([prompts[2]])
    # A server that knows no stop token runs on to the limit: our own set ends the answer, and what follows is overshoot.
    stopping = next(prompt for prompt in prompts if expected[prompt.id].stopped)
    answer = _Deaf(server, asker())(stopping)
    assert (answer.token_ids, answer.finish) == (expected[stopping.id].completion_ids, "stop")
    assert answer.past_end[:OVERSHOOT] == expected[stopping.id].overshoot_ids[: len(answer.past_end)]


class _Deaf:
    """Asks a server that does not hear `stop_token_ids`."""

    def __init__(self, server: EngineServer, asking: Asker) -> None:
        self._server, self._asking = server, asking

    def __call__(self, prompt: RenderedPrompt) -> Answer:
        complete = self._server.complete
        self._server.complete = lambda ids, limit, **_: complete(ids, limit, ignore_eos=True, stops=())  # type: ignore[method-assign]
        answer = self._asking.engine.ask(prompt, max_new_tokens=LIMIT)
        assert isinstance(answer, Answer)
        return answer


def test_a_refused_connection_and_an_unknown_name_are_said(tokenizer: Any, tmp_path: Path, server: EngineServer) -> None:
    with serving(EngineServer(server.greedy, tokenizer, model_path="x")) as gone:
        pass
    with pytest.raises(HostBusy, match=r"cannot be reached after 3 tries"):
        Asker(gone, tokenizer, tmp_path).engine.identity()
    client = JsonClient(ServerAccess(url="http://no-such-host.invalid:1", retries=0), backoff_s=0.0)
    with pytest.raises(InputError, match="is not known on this host"):
        client.get("/model_info")


def test_the_key_is_sent_and_never_said(
    server: EngineServer,
    tokenizer: Any,
    prompts: list[RenderedPrompt],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    server.key = "right-secret"
    with pytest.raises(InputError, match=r"refuses us \(401\): it wants a key"):
        Asker(server, tokenizer, tmp_path).engine.identity()
    monkeypatch.setenv("DFLASH_EVAL_ENGINE_KEY", "wrong-secret")
    with pytest.raises(InputError, match="our key is not accepted") as caught:
        Asker(server, tokenizer, tmp_path).engine.identity()
    key_file = tmp_path / "key"
    key_file.write_text("right-secret\n")
    key_file.chmod(0o644)
    with pytest.raises(InputError, match="can be read by others"):
        Asker(server, tokenizer, tmp_path, api_key_file=str(key_file))
    key_file.chmod(0o600)
    asking = Asker(server, tokenizer, tmp_path, api_key_file=str(key_file))
    asking(prompts[:1])
    server.faults.append("400")
    monkeypatch.setattr("tests.engine_server._Handler._misbehave", _echo_key)
    with pytest.raises(InputError, match=r"\*\*\*") as echoed:
        asking(prompts[1:2])
    kept = "".join(path.read_text() for path in tmp_path.glob("*.json"))
    for where in (caplog.text, str(caught.value), str(echoed.value), repr(echoed.value.__cause__), kept):
        assert "secret" not in where


def _echo_key(handler: Any, _fault: str) -> bool:
    handler._say(400, {"error": handler.headers["Authorization"]})
    return True


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:30000", "ftp://a", "http://", "http://user:secret@host:1", "http://host:1/?key=secret", "http://h:99999"],
)
def test_an_address_that_is_none_or_holds_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(InputError) as caught:
        ServerAccess(url=url)
    assert "secret" not in str(caught.value)


def test_old_servers_are_asked_by_the_old_names(asker: Callable[..., Asker], server: EngineServer) -> None:
    server.old_names = True
    engine = asker().engine
    assert engine.identity() == engine.identity() == server.info
    assert server.counts["GET"] == 3


def test_a_server_of_another_protocol_is_named(asker: Callable[..., Asker], server: EngineServer) -> None:
    server.info = {}
    server.old_names = True
    with pytest.raises(InputError, match=r"has no /nowhere"):
        asker().client.post("/nowhere", {}, counted_as="x")


def test_one_of_several_models_must_be_named(
    asker: Callable[..., Asker], server: EngineServer, prompts: list[RenderedPrompt]
) -> None:
    server.models = [{"id": "a"}, {"id": "b", "root": str(DEMO_TARGET)}]
    with pytest.raises(InputError, match="serves 2 models"):
        asker("openai").engine.identity()
    with pytest.raises(InputError, match="does not serve 'c'"):
        asker("openai", model="c").engine.identity()
    assert asker("openai", model="b")(prompts[:1])[0].engine == "openai"
    assert server.asked[-1]["model"] == "b"


def test_how_far_a_servers_word_reaches(tmp_path: Path) -> None:
    assert served_as_target({"model_path": str(DEMO_TARGET)}, DEMO_TARGET, hub_id=None) == FILES
    assert served_as_target({"root": "org/model"}, DEMO_TARGET, hub_id="org/model") == NAME
    assert served_as_target({"id": "served", "model_type": "qwen3_5_text"}, DEMO_TARGET, hub_id=None) == ARCHITECTURE
    assert served_as_target({"id": "served"}, DEMO_TARGET, hub_id="org/model") == NOTHING
    with pytest.raises(InputError, match="model_type 'llama'"):
        served_as_target({"model_type": "llama"}, DEMO_TARGET, hub_id=None)
    for path in DEMO_TARGET.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(InputError, match=r"which is not the target .* model\.safetensors differs"):
        served_as_target({"model_path": str(tmp_path)}, DEMO_TARGET, hub_id=None)


CANARY = Canary(token_ids=(1, 2, 3, 4, 5, 6), logprobs=(-0.1, -0.2, -0.3, -0.7, -0.7, -0.1))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"logprobs": (-0.12, -0.2, -0.3, -0.72, -0.7, -0.1)}, True),
        ({"logprobs": (-0.1, -0.2, -0.9, -0.7, -0.7, -0.1)}, False),
        ({"token_ids": (1, 2, 3, 4, 9, 9), "logprobs": (-0.1, -0.2, -0.3, -0.7, -0.71, -2.0)}, True),
        ({"token_ids": (1, 2, 3, 4, 9, 9), "logprobs": (-0.1, -0.2, -0.3, -0.7, -1.7, -2.0)}, False),
        ({"token_ids": (1, 2, 3, 4, 9, 9), "logprobs": None}, False),
        ({"token_ids": (9, 2, 3, 4, 5, 6)}, False),
        ({"logprobs": None}, True),
    ],
)
def test_near_ties_may_part_a_canary_and_nothing_else(change: dict[str, Any], same: bool) -> None:
    assert CANARY.same_model(replace(CANARY, **change)) is same


@pytest.mark.parametrize("how", ["info", "weights"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_restart_with_another_model_half_way_is_caught_and_nothing_of_it_is_kept(
    asker: Callable[..., Asker],
    server: EngineServer,
    prompts: list[RenderedPrompt],
    expected: dict[str, Reference],
    greedy: Greedy,
    other_greedy: Greedy,
    protocol: str,
    how: str,
) -> None:
    asker(protocol)(prompts[:1])

    def restart() -> None:
        server.greedy = other_greedy
        if how == "info":
            server.info["weight_version"] = "v2"
            server.models = [{"id": "served", "root": str(DEMO_TARGET), "max_model_len": 99}]

    first_completion_of_a_round = 2 if protocol != "openai-text" else 3
    server.after = (server.counts["completion"] + first_completion_of_a_round, restart)
    with pytest.raises(StageError, match=r"serves another model than|answers a fixed prompt otherwise"):
        asker(protocol)(prompts)
    # The right model is back: what was confirmed is kept, the rest is asked for anew, and every answer is the target's.
    server.greedy = greedy
    server.info["weight_version"] = "default"
    server.models = [{"id": "served", "root": str(DEMO_TARGET), "max_model_len": 4096}]
    answers = asker(protocol)(prompts)
    assert [answer.completion_ids for answer in answers] == [expected[prompt.id].completion_ids for prompt in prompts]


@pytest.mark.parametrize("changed", [False, True])
def test_answers_that_were_not_confirmed_count_only_while_the_server_is_the_same(
    asker: Callable[..., Asker], server: EngineServer, prompts: list[RenderedPrompt], other_greedy: Greedy, changed: bool
) -> None:
    server.faults.extend(["", "", "500"])
    with pytest.raises(StageError, match="answered 500"):
        asker()(prompts)
    assert server.counts["completion"] == 3
    if changed:
        server.greedy = other_greedy
    asker()(prompts)
    # Two answers were kept as pending; the session that goes on takes them only from the same model.
    assert server.counts["completion"] == 3 + (4 if changed else 2)


def test_nothing_is_asked_twice(asker: Callable[..., Asker], server: EngineServer, prompts: list[RenderedPrompt]) -> None:
    twin = replace(prompts[0], id="twin")
    asker()([*prompts[:2], twin])
    assert server.counts["completion"] == 2
    before = dict(server.counts)
    again = asker()([*prompts[:2], twin])
    assert dict(server.counts) == before
    assert [answer.sample_id for answer in again] == [prompts[0].id, prompts[1].id, "twin"]
    asker()(prompts)
    assert server.counts["completion"] == 4
    # Another protocol is another maker.
    asker("openai")(prompts)
    assert server.counts["completion"] == 8


@pytest.mark.parametrize(
    ("protocol", "counters", "steps", "accepted"),
    [
        (
            "sglang",
            {"spec_verify_ct": 4, "spec_accept_length": 3.5, "spec_num_correct_drafts": 9, "spec_num_proposed_drafts": 28},
            4,
            9,
        ),
        ("sglang", {"spec_verify_ct": 4, "spec_accept_token_num": 9, "spec_draft_token_num": 28}, 4, 9),
        (
            "openai",
            {"num_spec_steps": 5, "num_accepted_draft_tokens": 8, "num_draft_tokens": 35, "mean_acceptance_length": 2.6},
            5,
            8,
        ),
        ("sglang", {"spec_verify_ct": 0}, None, None),
    ],
)
def test_counters_of_the_servers_own_drafter_are_kept(
    asker: Callable[..., Asker],
    server: EngineServer,
    prompts: list[RenderedPrompt],
    protocol: str,
    counters: dict[str, Any],
    steps: int | None,
    accepted: int | None,
) -> None:
    server.spec = counters
    (answer,) = asker(protocol)([prompts[2]])
    if steps is None:
        assert answer.served is None
        return
    assert (answer.served.tokens, answer.served.verify_steps, answer.served.accepted) == (LIMIT, steps, accepted)
    assert answer.served.raw == counters
    assert json.loads(json.dumps(counters)) == counters
