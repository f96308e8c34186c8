"""Known training bugs as switches, so that each can be made on purpose: what a doctor claims to name must exist.

Every one was reported of a public trainer, loads without an error and drafts badly. None is ever on by default.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One training bug."""

    what: str
    """What goes wrong, in one sentence."""

    noise_on_verifier: bool = False
    """The noise meant for fc's input is also put on the state that the verifier's labels are computed from."""

    last_tap_is_verifiers: bool = False
    """fc is fed the target's last layer in place of the last declared tap."""

    hard_label_shift: int = 0
    """As in LossForm."""

    verifier_shift: int = 0
    """As in LossForm."""

    uniform_weights: bool = False
    """Every slot weighs the same, whatever gamma says."""

    context_past_anchor: int = 0
    """As in Layout."""

    causal_block: bool = False
    """Every layer is trained causal in the block; the config still declares what it declares."""

    random_head: bool = False
    """Trained under a random head of its own, which the checkpoint then leaves out."""

    padded_in_front: bool = False
    """Target states come from rows padded in front, without an attention mask."""

    needs_verifier_labels: bool = False
    """The bug shows only where labels come from the verifier."""

    needs_noise: bool = False
    """The bug shows only with noise."""


FAULTS = {
    "noise_on_labels": Fault(
        what="noise reaches the target's logits", noise_on_verifier=True, needs_verifier_labels=True, needs_noise=True
    ),
    "verifier_layer_in_fc": Fault(what="the verifier's layer is fed to fc as the last tap", last_tap_is_verifiers=True),
    "soft_labels_shifted": Fault(what="soft labels come from the next position", verifier_shift=1, needs_verifier_labels=True),
    "labels_shifted": Fault(what="hard labels are shifted by one", hard_label_shift=1),
    "uniform_loss": Fault(what="every slot weighs the same", uniform_weights=True),
    "anchor_in_context": Fault(what="the context lets the anchor's own state in", context_past_anchor=1),
    "causal_block": Fault(what="trained causal in the block, declared bidirectional", causal_block=True),
    "random_head": Fault(what="trained under a random head instead of the target's", random_head=True),
    "padded_states": Fault(what="states come from rows padded in front without a mask", padded_in_front=True),
}
NO_FAULT = Fault(what="")
