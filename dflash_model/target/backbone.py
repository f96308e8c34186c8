"""The target as a loaded model: its causal language model, and in it the text decoder whose layers are tapped.

Always `AutoModelForCausalLM`: for a multimodal checkpoint it gives the text part with its head, while `AutoModel` gives a
wrapper without one. A load that leaves a tensor missing or over is refused, since transformers would fill it at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from dflash_model.errors import CheckpointError, ConfigError, HostError, InputError, StageError
from dflash_model.target.model_directory import read_config, shard_paths
from dflash_model.target.room import require_room

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Backbone:
    """A loaded target and the modules that hidden states are taken from."""

    model: Any
    """The causal language model (transformers), in eval mode."""

    decoder: nn.Module
    """Its text decoder: embedding, layers, final norm."""

    layers: nn.ModuleList
    """The decoder layers, 0-based."""

    norm: nn.Module
    """The final norm."""

    hidden_size: int
    """H."""

    max_positions: int
    """Longest sequence that the target's config allows."""

    dtype: torch.dtype
    """Of weights and activations."""

    input_device: torch.device | None = None
    """Where token ids must lie, where the embedding's place does not tell it (a target that is read layer by layer)."""

    @property
    def num_layers(self) -> int:
        """L: tap indices run from 0 (embedding) to L (output of the last layer)."""
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        """Where token ids must lie."""
        device: torch.device = self.input_device or self.model.get_input_embeddings().weight.device
        return device

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raises InputError for a sequence that is empty, too long, or holds an id without an embedding row.

        (On a GPU the last would abort the whole process instead of raising.)
        """
        if not 0 < len(token_ids) <= self.max_positions:
            raise InputError(
                f"A sequence of {len(token_ids)} tokens does not fit the target's {self.max_positions} positions.",
                "Shorten the prompt or ask for fewer new tokens.",
            )
        rows = int(self.model.get_input_embeddings().weight.shape[0])
        foreign = [token for token in token_ids if not 0 <= token < rows]
        if foreign:
            raise InputError(
                f"The token id {foreign[0]} has no row in the target's embedding of {rows}.",
                "Use references and prompts that were made for this target.",
            )


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`. Raises ConfigError for any but bfloat16 and float32."""
    if name not in DTYPES:
        raise ConfigError(
            f"The target cannot be run in {name}.",
            f"Use one of {', '.join(DTYPES)}; large activations overflow float16 silently.",
        )
    return DTYPES[name]


def load_backbone(directory: Path, *, dtype: str, device: str = "cpu") -> Backbone:
    """Load the target in `directory` with transformers; `device` may be "auto" to spread it over several GPUs.

    Raises ConfigError for another dtype than bfloat16 or float32 and for "auto" without accelerate, InputError for a
    directory or model type that cannot be used, CheckpointError where weights are missing, left over or of a wrong shape,
    HostError where the device is not there, HostBusy where a GPU has not enough free memory: others may be using it.
    """
    torch_dtype = parse_dtype(dtype)
    read_config(directory)
    shard_paths(directory)
    if device == "auto" and find_spec("accelerate") is None:
        raise ConfigError(
            "device is auto, but accelerate is not installed.", "Install accelerate on that host, or name one device."
        )
    check_device(device)
    if device.startswith("cuda"):
        require_room(directory, dtype=torch_dtype, device=device)
    return backbone_of(_load_model(directory, torch_dtype, device))


def skeleton(directory: Path, *, dtype: str, device: str = "cpu") -> Backbone:
    """The target's model without weights (all on "meta"): what it is made of, in a tenth of a second.

    Raises ConfigError for another dtype than bfloat16 or float32, InputError for a directory or model type that cannot be
    used, HostError where the device is not there.
    """
    import transformers

    torch_dtype = parse_dtype(dtype)
    read_config(directory)
    check_device(device)
    configs: Any = transformers.AutoConfig
    models: Any = transformers.AutoModelForCausalLM
    with _loading_errors(directory):
        config = configs.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            model = models.from_config(config, dtype=torch_dtype)
    model.eval()
    return replace(backbone_of(model), input_device=torch.device("cuda" if device == "auto" else device))


def backbone_of(model: Any) -> Backbone:
    """The parts of a loaded causal language model. Raises InputError naming the class where its decoder is of another form."""
    decoder = model.get_decoder()
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module) or model.get_output_embeddings() is None:
        raise InputError(
            f"{type(model).__name__} has no decoder with layers, norm and head; its decoder is {type(decoder)}.",
            "Use a decoder-only causal language model as target.",
        )
    text = model.config.get_text_config()
    return Backbone(
        model=model,
        decoder=decoder,
        layers=layers,
        norm=norm,
        hidden_size=int(text.hidden_size),
        max_positions=int(text.max_position_embeddings),
        dtype=next(layers.parameters()).dtype,
    )


def check_device(device: str) -> None:
    """Raises HostError for a CUDA device where torch sees none."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise HostError(
            f"The target should run on {device}, but torch sees no GPU here.", "Use a host with a GPU, or device cpu."
        )


@contextmanager
def _loading_errors(directory: Path) -> Iterator[None]:
    """What transformers raises where it cannot load, as errors of ours."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise InputError(
            f"transformers cannot load the target in {directory}: {exc}.", "Check the target's files and model_type."
        ) from exc
    except (RuntimeError, SafetensorError) as exc:
        raise CheckpointError(f"The weights in {directory} do not fit its config: {exc}.", "Copy the target again.") from exc


def _load_model(directory: Path, dtype: torch.dtype, device: str) -> Any:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"device_map": "auto"} if device == "auto" else {}
    with _loading_errors(directory), _quiet_progress():
        model, loading = auto.from_pretrained(directory, dtype=dtype, local_files_only=True, output_loading_info=True, **options)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in loading[kind])
        if names:
            raise CheckpointError(
                f"Loading {directory} left {len(names)} {kind.replace('_', ' ')}, such as {names[0]}.",
                "Use a complete checkpoint of a model type that the installed transformers knows.",
            )
    model.eval()
    if device != "auto":
        try:
            model.to(device)
        except RuntimeError as exc:
            raise StageError(f"The target does not go onto {device}: {exc}.", "Use a larger device, or device auto.") from exc
    return model


@contextmanager
def _quiet_progress() -> Iterator[None]:
    """transformers draws a bar while loading, which would fill a stage's log."""
    from transformers.utils import logging as transformers_logging

    bars: Any = transformers_logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
