"""What one evaluation is asked to do. Pydantic, so that the Prefect UI shows it as a form and refuses nonsense."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

REQUEST_FILE = "request.json"
"""The parameters of a run, in its directory."""


class Strict(BaseModel):
    """Unknown keys are errors: a misspelt option must not be ignored."""

    model_config = ConfigDict(extra="forbid")


class DrafterSource(Strict):
    """Where a drafter lies: a `.pt` training file or a directory with config.json and safetensors."""

    path: str = Field(description="Absolute path on the host, or a glob there: the newest complete match is taken.")
    host: str | None = Field(default=None, description="Host of the inventory; none: the first one with the role train.")
    name: str | None = Field(default=None, description="How tables call it; none: the file's name.")


class TargetSource(Strict):
    """Where the target model lies: a directory on a host, or a hub id with a pinned revision."""

    path: str | None = Field(default=None, description="Directory with config.json, safetensors and tokenizer.")
    hub_id: str | None = Field(default=None, description="Hub repository, fetched on the target host.")
    revision: str | None = Field(default=None, description="Commit of `hub_id`; required with it.")
    host: str | None = Field(default=None, description="Host of the inventory; none: the first one with the role target.")

    @model_validator(mode="after")
    def _one_place(self) -> TargetSource:
        if (self.path is None) == (self.hub_id is None):
            raise ValueError("give either `path` or `hub_id`")
        if self.hub_id is not None and not self.revision:
            raise ValueError("`hub_id` needs a `revision` (a commit), else two nights could use two targets")
        return self


class BareConfig(Strict):
    """What the config of a bare `.pt` would say. Only what its tensors and saved args do not tell is needed."""

    config_path: str | None = Field(default=None, description="A config.json (z-lab form) on the relay.")
    config_from_reference: bool = Field(default=False, description="Take it from the reference after comparing every shape.")
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = Field(default=None, description="z-lab ids: i is the output of 0-based layer i.")
    block_size: int | None = None
    rope_theta: float | None = None
    rms_norm_eps: float | None = None
    state_key: str | None = Field(
        default=None, description="Where in the file the drafter's state dict is, if not under a usual key."
    )


class References(Strict):
    """How the target's greedy references are made. Which engine, and not where it is, belongs to their identity."""

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)

    from_: Literal["transformers", "sglang", "openai", "openai-text"] = Field(
        default="transformers",
        validation_alias=AliasChoices("from", "from_"),
        serialization_alias="from",
        description="Who generates: transformers in the stage itself, or a running engine: sglang (its own /generate), openai "
        "(/v1/completions with token ids: vLLM, SGLang), openai-text (text only: a sample counts only where its text gives its "
        "tokens back, and nothing is known past its end).",
    )
    url: str | None = Field(
        default=None, description="Address of the engine as the host sees it that runs the stage: http://127.0.0.1:30000."
    )
    model: str | None = Field(default=None, description="The model's name there; none: the only one it serves.")
    concurrency: int = Field(default=4, ge=1, le=256, description="Requests to the engine at a time.")
    timeout_s: float = Field(default=600, gt=0, description="Longest wait for one completion of the engine.")
    retries: int = Field(default=6, ge=0, le=20, description="Further tries where it is busy or the connection fails.")
    api_key_env: str = Field(
        default="DFLASH_EVAL_ENGINE_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable of that host with the engine's key, if it wants one. Never the key itself.",
    )
    api_key_file: str | None = Field(
        default=None, description="File on that host with the key, readable by its owner alone (0600); wins over the variable."
    )
    max_new_tokens: int = Field(default=256, ge=2)
    overshoot_tokens: int = Field(default=16, ge=0, description="Greedy tokens known past the end, for z-lab's tail rule.")
    thinking: bool | None = Field(
        default=None, description="Thinking mode of the chat template; none: the template's own default."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Of the target where it runs in a stage: hidden states, and references by transformers."
    )

    @model_validator(mode="after")
    def _an_engine_has_an_address(self) -> References:
        if self.url is not None and ("@" in self.url or "?" in self.url):
            raise ValueError(
                "`url` holds a login or a query: give the key in a variable or a file (`api_key_env`, `api_key_file`)"
            )
        if (self.from_ != "transformers") != (self.url is not None):
            raise ValueError(
                f"references from {self.from_} need a `url`"
                if self.url is None
                else "`url` needs `from`: sglang, openai or openai-text"
            )
        return self

    @property
    def identity(self) -> dict[str, Any]:
        """Parameters of the references stage: what decides the tokens."""
        dtype = self.dtype if self.from_ == "transformers" else None
        return {
            "from": self.from_,
            "max_new_tokens": self.max_new_tokens,
            "overshoot_tokens": self.overshoot_tokens,
            "thinking": self.thinking,
            "dtype": dtype,
        }

    @property
    def server(self) -> dict[str, Any] | None:
        """Where the engine is and how it is asked; None without one."""
        names = {"url", "model", "concurrency", "timeout_s", "retries", "api_key_env", "api_key_file"}
        return self.model_dump(include=names) if self.url is not None else None


class EngineStates(Strict):
    """States that a serving engine made, as files on the host that runs the stage; one prompt is computed again and compared."""

    engine: Literal["vllm", "sglang"]
    path: str = Field(description="Directory with vLLM's extract_hidden_states files, or SGLang's /generate answers as .json.")
    layer_ids: list[int] = Field(
        min_length=1, description="As the engine was given them, in that order; vLLM's id is z-lab's + 1. Include the last layer."
    )


class HiddenStates(Strict):
    """How the target's hidden states are computed. `extraction` and `max_gpu_memory_gib` change no bit of them."""

    extraction: Literal["auto", "full", "streaming"] = Field(
        default="auto",
        description="full loads the target whole, streaming reads it layer by layer in bounded memory; auto looks at what is free.",
    )
    max_gpu_memory_gib: float | None = Field(
        default=None, gt=0, description="Take no more of a GPU's memory; none: what is free."
    )
    batch: int = Field(default=1, ge=1, le=64, description="Sequences in one right-padded forward; may change last bits.")
    engine: EngineStates | None = Field(default=None, description="Take them from an engine's files instead.")
    thresholds: dict[str, float] = Field(
        default_factory=dict, description="Lines of the fidelity gate that are moved: name -> value."
    )


class Gate(Strict):
    """When a night is red: the run then ends as Regressed, and the command line with code 4. A rule left out is off."""

    worse_than_reference: float | None = Field(
        default=None, ge=0, description="Red where a candidate is worse than the reference by more than this share of its tau."
    )
    worse_than_best: float | None = Field(
        default=None,
        ge=0,
        description="Likewise against the best earlier checkpoint of the same training run, on the same ground.",
    )
    min_tau: float | None = Field(default=None, gt=0, description="Red where a candidate's pooled tau lies below.")
    fidelity_pass: bool = Field(default=False, description="Red where the fidelity gate says anything but PASS.")


class Notify(Strict):
    """Whom to tell. The webhook's address is a secret: it comes from $DFLASH_EVAL_WEBHOOK or a Prefect Secret block."""

    on: Literal["always", "trouble", "never"] = Field(
        default="always", description="trouble: only when the run is red, failed or crashed. No webhook set: nobody is told."
    )
    secret_block: str | None = Field(default=None, description="Name of the Prefect Secret block with the webhook's address.")
    link: str | None = Field(
        default=None, description="Address under which the runs' directories are served; none: the report's path is named."
    )


class EvaluateParameters(Strict):
    """One evaluation: candidates against a reference drafter, on the same prompts, target and hidden states."""

    home: str | None = Field(default=None, description="The relay's home; none: $DFLASH_EVAL_HOME or ~/.dflash-eval.")
    inventory: str | None = Field(default=None, description="Hosts file; none: this machine plays every part.")
    candidates: list[DrafterSource] = Field(min_length=1)
    reference: DrafterSource | None = None
    target: TargetSource
    prompts: str = Field(description="JSONL file on the relay.")
    references: References = References()
    hidden_states: HiddenStates = HiddenStates()
    bare: BareConfig = BareConfig()
    cast: Literal["keep", "bf16"] = Field(
        default="keep",
        description="bf16: round float32 weights to bfloat16 when they are taken out of a checkpoint; halves what moves.",
    )
    tail: Literal["truncated", "zlab", "pypi", "deepspec"] = Field(
        default="truncated",
        description="How the last step of a request is drafted and counted: as serving engines, z-lab's git loop, PyPI dflash "
        "or DeepSpec do.",
    )
    anchors: Literal["visited", "all"] | Annotated[int, Field(ge=1)] = Field(
        default="visited",
        description="Which anchors are replayed: those that the walks visit, all, or also every so-many-th (a number).",
    )
    equal_within: float = Field(default=0.02, ge=0, description="Relative difference of tau that counts as equal.")
    shards: int = Field(default=1, ge=1, le=64, description="Parts into which each replay is split.")
    deadline_s: float = Field(default=6 * 3600, gt=0, description="Longest time of one stage.")
    gpu_wait_s: float = Field(
        default=3600, ge=0, description="How long a stage waits where others use every GPU that it could have."
    )
    placement: dict[str, list[str]] = Field(
        default_factory=dict, description="Stage -> hosts to run it on, in order; a stage not named goes by roles."
    )
    failover: bool = Field(default=True, description="Go on with the next host when one is down.")
    gate: Gate = Gate()
    notify: Notify = Notify()
    redo_from: str | None = Field(default=None, description="Make this stage and all after it anew, whatever is there.")
    run_id: str | None = Field(default=None, description="Name of the run's directory; none: made from the time.")

    @model_validator(mode="after")
    def _known_past_the_end(self) -> EvaluateParameters:
        if self.tail == "zlab" and self.references.from_ == "openai-text":
            raise ValueError(
                "the tail rule zlab counts tokens past the end of an answer, which openai-text cannot tell: use tail truncated, "
                "or an engine that returns token ids"
            )
        return self

    @property
    def stride(self) -> int | None:
        """`anchors` as a stride; None: only those that walks visit."""
        return {"visited": None, "all": 1}[self.anchors] if isinstance(self.anchors, str) else self.anchors

    @property
    def prompts_path(self) -> Path:
        """`prompts` as a path."""
        return Path(self.prompts).expanduser()
