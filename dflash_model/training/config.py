"""What a training run is told: one YAML file, read into frozen dataclasses. Unknown keys and wrong kinds are refused.

Paths are relative to the file. Everything that decides a weight stands here; the pipeline's part decides only where and
how fast.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from dflash_model.errors import ConfigError, from_os_error
from dflash_model.training.anchors import NEXT_SUPERVISED, RULES
from dflash_model.training.block_masks import FLEX, SDPA
from dflash_model.training.faults import FAULTS, NO_FAULT, Fault
from dflash_model.training.losses import DATA, LossForm

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """The drafter to train; names as in z-lab's config.json."""

    target_layer_ids: tuple[int, ...]
    """Tapped target layers: id i is the output of 0-based layer i."""

    mask_token_id: int
    """Id that fills the unknown rows of a block."""

    family: str = "dflash"
    """"dflash", or "dflash2" with convolutions inside the block and a candidate selector."""

    block_size: int = 8
    """Rows of a block, the anchor's included."""

    num_layers: int = 2
    """Draft depth."""

    num_heads: int = 4
    """Query heads."""

    num_kv_heads: int = 2
    """Key/value heads."""

    head_dim: int = 32
    """Width of a head."""

    intermediate_size: int = 256
    """Inner width of the MLP."""

    rms_norm_eps: float = 1e-6
    """Epsilon of every norm."""

    rope_theta: float = 10000.0
    """Base of the rotation."""

    rotary_dims: int | None = None
    """Leading dimensions of a head that are rotated; None: all."""

    layer_types: tuple[str, ...] | None = None
    """"full_attention" or "sliding_attention" per layer; None: all full."""

    sliding_window: int | None = None
    """Window of the sliding layers."""

    is_causal: bool | None = None
    """None: sliding layers are causal in the block, full ones are not. Else what every layer is."""

    sample_from_anchor: bool = False
    """True: the anchor's slot predicts too, and every label is shifted by one."""

    own_tables: bool = False
    """True: the checkpoint holds an embedding (the target's, frozen) and a head (trained from the target's)."""

    draft_vocab_size: int | None = None
    """Rows of a head over the most frequent tokens of the training answers; None: the target's vocabulary."""

    conv_kernel_size: int = 2
    """dflash2: taps of each convolution."""

    conv_group_size: int = 16
    """dflash2: channels that share a dynamic kernel."""

    selector_rank: int = 16
    """dflash2: width of the selector's codebooks."""

    selector_top_k: int = 8
    """dflash2: candidates among which the selector chooses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """What a step sees."""

    sequences: int = 6
    """Rows of a step."""

    anchors: int = 24
    """Anchors a row."""

    anchor_rule: str = NEXT_SUPERVISED
    """Which positions may be anchors, one of `anchors.RULES`."""

    lengths: tuple[int, ...] = (64, 96, 128, 160, 192, 256)
    """The shapes in use: a row is padded behind to the smallest of these that holds it."""

    noise: float = 0.0
    """Uniform noise on fc's input, in units of each tap's root mean square."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Muon for the layers' matrices, AdamW for everything else."""

    muon_lr: float = 0.02
    """Peak learning rate of Muon."""

    adamw_lr: float = 6e-3
    """Peak learning rate of AdamW."""

    warmup_steps: int = 10
    """Steps in which the rates rise linearly."""

    final_share: float = 0.1
    """Share of the peak that is left at the last step, after a linear fall."""

    clip_norm: float | None = 1.0
    """Largest norm of the gradient; None: not clipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Where and how the stages run. Changes no weight, except that several drafter workers add gradients in shards."""

    target_devices: tuple[str, ...] = ("cpu",)
    """One target-forward worker each."""

    drafter_devices: tuple[str, ...] = ("cpu",)
    """One drafter worker each; the first holds the optimizer."""

    target_dtype: str = "float32"
    """What the target is run in."""

    prefetched_batches: int = 4
    """Batches held ready before the target."""

    queued_states: int = 2
    """Hidden states held ready before the drafter, per target worker."""

    threads: int = 1
    """Threads of each CPU operation."""

    attention: str = SDPA
    """"sdpa", or "flex" on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """One training run."""

    target: Path
    """Directory of the target."""

    data: Path
    """Its answers, a references file (`dflash_model/target/references.py`)."""

    out: Path
    """Where checkpoints and telemetry go."""

    steps: int
    """Where it stops."""

    drafter: DrafterConfig
    """What is trained."""

    seed: int = 0
    """Decides weights, order, anchors and noise."""

    save_every: int = 100
    """Steps between checkpoints; the last step is always saved."""

    save_steps: tuple[int, ...] = ()
    """Further steps to save at."""

    log_every: int = 10
    """Steps between samples of metrics and telemetry."""

    save_dtype: str = "bfloat16"
    """Of the exported z-lab drafter; the training file keeps float32."""

    fault: str | None = None
    """A known bug to make on purpose, one of `faults.FAULTS`."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    """What a step sees."""

    loss: LossForm = field(default_factory=LossForm)
    """How it is judged."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How it is changed."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Where it runs."""

    @property
    def made_fault(self) -> Fault:
        """The bug that is made, or none."""
        return FAULTS[self.fault] if self.fault else NO_FAULT

    @property
    def effective_loss(self) -> LossForm:
        """`loss` with the bug's changes."""
        fault = self.made_fault
        return replace(
            self.loss,
            gamma=None if fault.uniform_weights else self.loss.gamma,
            hard_label_shift=fault.hard_label_shift,
            verifier_shift=fault.verifier_shift,
        )

    def what_decides_weights(self) -> dict[str, Any]:
        """A JSON value of every setting that a resumed run must share."""
        value = asdict(self)
        for name in ("target", "data", "out", "save_every", "save_steps", "log_every", "save_dtype"):
            value.pop(name)
        value["pipeline"] = {"drafter_workers": len(self.pipeline.drafter_devices), "target_dtype": self.pipeline.target_dtype}
        plain: dict[str, Any] = _plain(value)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value


def read_config(path: Path) -> TrainingConfig:
    """Read a YAML file. Raises ConfigError naming the key that is unknown, missing or of a wrong kind."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise from_os_error(exc, f"reading {path}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not YAML: {exc}.", "Mend the file.") from exc
    return parse_config(values, base=path.parent)


def parse_config(values: Any, *, base: Path) -> TrainingConfig:
    """The config of a mapping; relative paths count from `base`. Raises ConfigError."""
    config: TrainingConfig = _build(TrainingConfig, values, "")
    config = replace(config, **{name: base / getattr(config, name) for name in ("target", "data", "out")})
    _check(config)
    return config


def _build(cls: type, values: Any, place: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{place or 'The training config'} is {values!r}.", "Write a mapping of keys to values.")
    known = {f.name: f for f in fields(cls)}
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise ConfigError(f"{place}{unknown[0]} is no key of a training config.", f"Known here: {', '.join(known)}.")
    missing = [n for n, f in known.items() if n not in values and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise ConfigError(f"The training config lacks {place}{missing[0]}.", "Write it.")
    hints = get_type_hints(cls)
    built = {key: _value(hints[key], value, f"{place}{key}") for key, value in values.items()}
    try:
        return cls(**built)
    except ValueError as exc:
        raise ConfigError(f"{place.rstrip('.')}: {exc}.", "Correct the value.") from exc


def _value(kind: Any, value: Any, place: str) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        return None if value is None else _value(options[0], value, place)
    if is_dataclass(kind) and isinstance(kind, type):
        return _build(kind, value, f"{place}.")
    if get_origin(kind) is tuple:
        if isinstance(value, list | tuple):
            return tuple(_value(get_args(kind)[0], entry, place) for entry in value)
    elif kind is Path:
        if isinstance(value, str | Path):
            return Path(value)
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif type(value) is kind:
        return value
    name = getattr(kind, "__name__", str(kind))
    raise ConfigError(f"{place} is {value!r}.", f"Write a value of the kind {name}.")


def _check(config: TrainingConfig) -> None:
    drafter, batch, pipeline, fault = config.drafter, config.batch, config.pipeline, config.fault
    types_ = drafter.layer_types or (FULL_ATTENTION,) * drafter.num_layers
    rules = (
        (config.steps >= 1 and config.save_every >= 1 and config.log_every >= 1, "steps, save_every and log_every", "at least 1"),
        (batch.sequences >= 1 and batch.anchors >= 1 and batch.noise >= 0, "batch", "sequences and anchors >= 1, noise >= 0"),
        (batch.anchor_rule in RULES, "batch.anchor_rule", f"one of {', '.join(RULES)}"),
        (bool(batch.lengths) and list(batch.lengths) == sorted(set(batch.lengths)), "batch.lengths", "distinct and ascending"),
        (drafter.family in ("dflash", "dflash2"), "drafter.family", "dflash or dflash2"),
        (drafter.draft_vocab_size is None or drafter.draft_vocab_size >= 2, "drafter.draft_vocab_size", "2 or more"),
        (drafter.family == "dflash" or drafter.draft_vocab_size is None, "drafter.draft_vocab_size", "unset for dflash2"),
        (drafter.block_size >= 2 and drafter.num_layers >= 1, "drafter", "block_size >= 2 and num_layers >= 1"),
        (drafter.num_heads % drafter.num_kv_heads == 0, "drafter.num_heads", "a multiple of num_kv_heads"),
        (len(types_) == drafter.num_layers, "drafter.layer_types", "one entry per layer"),
        (set(types_) <= {FULL_ATTENTION, SLIDING_ATTENTION}, "drafter.layer_types", f"{FULL_ATTENTION} or {SLIDING_ATTENTION}"),
        (SLIDING_ATTENTION not in types_ or bool(drafter.sliding_window), "drafter.sliding_window", "set, as a layer slides"),
        (pipeline.attention in (SDPA, FLEX), "pipeline.attention", f"{SDPA} or {FLEX}"),
        (bool(pipeline.target_devices) and bool(pipeline.drafter_devices), "pipeline", "one device or more for each side"),
        (len(pipeline.drafter_devices) <= batch.sequences, "pipeline.drafter_devices", "no more than batch.sequences"),
        (min(pipeline.prefetched_batches, pipeline.queued_states, pipeline.threads) >= 1, "pipeline", "depths and threads >= 1"),
        (fault is None or fault in FAULTS, "fault", f"one of {', '.join(FAULTS)}"),
    )
    for holds, key, wanted in rules:
        if not holds:
            raise ConfigError(f"{key} does not fit.", f"It must be {wanted}.")
    if pipeline.attention == FLEX and any(not device.startswith("cuda") for device in pipeline.drafter_devices):
        raise ConfigError("flex_attention has no gradient on a CPU.", "Set pipeline.attention to sdpa.")
    if config.made_fault.needs_verifier_labels and config.loss.labels == DATA:
        raise ConfigError(f"The fault {fault} needs labels of the verifier.", "Set loss.labels to verifier or verifier_best.")
    if config.made_fault.needs_noise and not batch.noise:
        raise ConfigError(f"The fault {fault} needs noise.", "Set batch.noise above 0.")
