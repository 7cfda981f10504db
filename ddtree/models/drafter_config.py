"""What a DFlash checkpoint says about itself (arXiv 2602.06036), in any of its three published forms.

- flat, z-lab's: `block_size` and `rope_theta` at the top, `dflash_config{mask_token_id, target_layer_ids}`;
- nested: `rope_parameters`, and `block_size` inside `dflash_config`;
- speculators': the layer stack under `transformer_layer_config`, `aux_hidden_state_layer_ids` counted like
  Hugging Face's `hidden_states` (one higher than ours), perhaps a smaller `draft_vocab_size`.

A value that would have to be guessed is an error. Ours is one optional key, `dflash_config.shrinkable_block`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.models.rope import RopeConfig

SLIDING = "sliding_attention"
FULL = "full_attention"
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_PAPER_URL = "arXiv 2602.06036"


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter's shape. `raw` is the published JSON, kept so that a checkpoint can be written back."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int | None
    layer_types: tuple[str, ...]
    sliding_window: int | None  # only the sliding layers read it
    is_causal: bool | None  # inside the block; None: sliding layers are causal, full ones are not
    attention_bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[
        int, ...
    ]  # L is the output of target layer L, Hugging Face's hidden_states[L + 1]
    num_target_layers: int | None
    vocab_size: int
    draft_vocab_size: int | None  # None: the drafter speaks the target's whole vocabulary
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    shrinkable_block: bool  # trained on mixed block lengths: the engine may draft fewer slots than block_size
    raw: Mapping[str, Any]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> DrafterConfig:
        """Read the JSON of a checkpoint; `source` names the file in messages.

        Raises:
            ValueError: a key that would be guessed is missing, or the checkpoint needs what is not implemented.
        """
        _refuse_other_drafters(config, source)
        reader = _Reader(config, source)
        if reader.stack.get("hidden_act", "silu") != "silu":
            raise ValueError(
                f"{source}: hidden_act {reader.stack['hidden_act']} is not implemented, only silu"
            )
        layer_types = reader.layer_types()
        drafter = cls(
            hidden_size=reader.stack_int("hidden_size"),
            num_layers=len(layer_types),
            num_heads=reader.stack_int("num_attention_heads"),
            num_kv_heads=int(
                reader.stack.get("num_key_value_heads") or reader.stack_int("num_attention_heads")
            ),
            head_dim=reader.head_dim(),
            intermediate_size=reader.stack_int("intermediate_size"),
            rms_norm_eps=float(reader.stack.get("rms_norm_eps", 1e-6)),
            rope=reader.rope(),
            max_position_embeddings=reader.stack.get("max_position_embeddings"),
            layer_types=layer_types,
            sliding_window=reader.sliding_window(),
            is_causal=reader.is_causal(),
            attention_bias=bool(reader.stack.get("attention_bias", False)),
            block_size=int(reader.required("block_size", "the block length it was trained with")),
            mask_token_id=int(reader.required("mask_token_id", "the id of the token that fills the block")),
            target_layer_ids=reader.target_layer_ids(),
            num_target_layers=config.get("num_target_layers"),
            vocab_size=reader.stack_int("vocab_size"),
            draft_vocab_size=reader.draft_vocab_size(),
            input_embedding_scale=float(reader.value("input_embedding_scale", 1.0)),
            output_multiplier=float(reader.value("output_multiplier", 1.0)),
            final_logit_softcapping=reader.softcap(),
            shrinkable_block=bool(reader.dflash.get("shrinkable_block", False)),
            raw=dict(config),
        )
        drafter._check_itself(source)
        return drafter

    def attends_causally(self, layer: int) -> bool:
        """Whether block rows of this layer see only the rows before them."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """Query-key distances of this layer are below this; None is without limit."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def check_against(self, target_config: Any) -> None:
        """Refuse a target that this drafter was not trained for; messages name both sides.

        Args:
            target_config: has `hidden_size`, `vocab_size` and `num_layers`.
        """
        target_vocab, target_layers = target_config.vocab_size, target_config.num_layers
        if self.hidden_size != target_config.hidden_size:
            raise ValueError(
                f"drafter hidden size {self.hidden_size}, target has {target_config.hidden_size}: "
                "use the drafter trained for this target"
            )
        if self.num_target_layers not in (None, target_layers):
            raise ValueError(
                f"drafter was trained on a target of {self.num_target_layers} layers, target has "
                f"{target_layers}: use the drafter trained for this target"
            )
        if max(self.target_layer_ids) >= target_layers:
            raise ValueError(
                f"drafter target_layer_ids {list(self.target_layer_ids)}, target has layers 0 to "
                f"{target_layers - 1}: use the drafter trained for this target"
            )
        if self.mask_token_id >= target_vocab:
            raise ValueError(
                f"drafter mask_token_id {self.mask_token_id}, target embedding has {target_vocab} rows: "
                "use the drafter trained for this target"
            )
        if not _same_but_for_padding(self.vocab_size, target_vocab):
            raise ValueError(
                f"drafter vocabulary {self.vocab_size}, target has {target_vocab}: "
                "use the drafter trained for this target"
            )

    def _check_itself(self, source: str) -> None:
        positive = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        for name in (*positive, "vocab_size", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{source}: {name} must be >= 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{source}: {self.num_heads} heads cannot share {self.num_kv_heads} key/value heads"
            )
        if not self.target_layer_ids or min(self.target_layer_ids) < 0:
            raise ValueError(
                f"{source}: target_layer_ids must name target layers from 0, got {list(self.target_layer_ids)}"
            )
        if self.mask_token_id < 0:
            raise ValueError(f"{source}: mask_token_id must be >= 0, got {self.mask_token_id}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"{source}: sliding_window must be >= 1, got {self.sliding_window}")


class _Reader:
    """Finds each value where one of the three forms keeps it."""

    def __init__(self, config: Mapping[str, Any], source: str):
        self.config = config
        self.source = source
        self.is_speculators = "transformer_layer_config" in config
        self.stack = config["transformer_layer_config"] if self.is_speculators else config
        self.dflash = config.get("dflash_config") or {}

    def value(self, key: str, default: Any = None) -> Any:
        """`dflash_config` wins over the top level, as in z-lab's reader."""
        found = self.dflash.get(key)
        found = self.config.get(key) if found is None else found
        return default if found is None else found

    def required(self, key: str, meaning: str, published_as: str | None = None) -> Any:
        name = published_as or key
        found = self.value(name)
        if found is None:
            raise ValueError(
                f"{self.source}: {name} is missing and would be guessed; "
                f"add {name} ({meaning}) from the drafter's training configuration"
            )
        return found

    def stack_int(self, key: str) -> int:
        if self.stack.get(key) is None:
            where = f"{self.source}: transformer_layer_config" if self.is_speculators else self.source
            raise ValueError(
                f"{where}: {key} is missing; this is not the config of a DFlash drafter ({_PAPER_URL})"
            )
        return int(self.stack[key])

    def head_dim(self) -> int:
        found = self.stack.get("head_dim")
        return int(found) if found else self.stack_int("hidden_size") // self.stack_int("num_attention_heads")

    def target_layer_ids(self) -> tuple[int, ...]:
        meaning = "the target layers whose hidden states it was trained on"
        if not self.is_speculators:
            return tuple(int(i) for i in self.required("target_layer_ids", meaning))
        found = self.required("target_layer_ids", meaning, "aux_hidden_state_layer_ids")
        if min(found, default=1) < 1:
            raise ValueError(
                f"{self.source}: aux_hidden_state_layer_ids {list(found)} names the embedding (0), "
                "which no target layer outputs; only ids from 1 are supported"
            )
        return tuple(int(i) - 1 for i in found)

    def rope(self) -> RopeConfig:
        if self.stack.get("rope_theta") is None and "rope_theta" not in (
            self.stack.get("rope_parameters") or {}
        ):
            raise ValueError(
                f"{self.source}: rope_theta is missing and would be guessed; add the rope_theta it was trained with"
            )
        try:
            return RopeConfig.from_hf(self.stack)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from None

    def sliding_window(self) -> int | None:
        window, declared = self.stack.get("sliding_window"), self.stack.get("layer_types")
        if declared is None or SLIDING not in declared:
            # Without layer_types, Qwen3's config class slides only if told to.
            return int(window) if window is not None and self.stack.get("use_sliding_window") else None
        if window is None or self.stack.get("use_sliding_window") is False:
            # z-lab's two readers disagree here (one drops the window, one keeps it): not ours to guess.
            raise ValueError(
                f"{self.source}: layer_types has {SLIDING} layers, but sliding_window is {window} and "
                f"use_sliding_window is {self.stack.get('use_sliding_window')}; set both as in training"
            )
        return int(window)

    def layer_types(self) -> tuple[str, ...]:
        num_layers = self.stack_int("num_hidden_layers")
        found = self.stack.get("layer_types")
        if found is None:
            first_sliding = self.stack.get("max_window_layers", 28)
            slides = self.sliding_window() is not None
            found = [SLIDING if slides and i >= first_sliding else FULL for i in range(num_layers)]
        if len(found) != num_layers:
            raise ValueError(f"{self.source}: layer_types has {len(found)} entries for {num_layers} layers")
        unknown = set(found) - {SLIDING, FULL}
        if unknown:
            raise ValueError(f"{self.source}: layer_types {sorted(unknown)} are not supported in a drafter")
        return tuple(found)

    def is_causal(self) -> bool | None:
        if self.is_speculators:
            # Their full layers are always bidirectional, their sliding ones unless this is set causal.
            return False if self.config.get("sliding_window_non_causal") else None
        found = self.config.get("is_causal")
        return None if found is None else bool(found)

    def draft_vocab_size(self) -> int | None:
        found = self.config.get("draft_vocab_size")
        return None if found is None or int(found) == self.stack_int("vocab_size") else int(found)

    def softcap(self) -> float | None:
        found = self.value("final_logit_softcapping")
        return float(found) if found and float(found) > 0 else None


def _refuse_other_drafters(config: Mapping[str, Any], source: str) -> None:
    dflash = config.get("dflash_config") or {}
    architectures = config.get("architectures") or []
    found = [key for key in _DFLASH2_KEYS if config.get(key) is not None or dflash.get(key) is not None]
    found += [name for name in architectures if name.startswith("DFlash2")]
    if found:
        raise ValueError(
            f"{source}: a DFlash 2 checkpoint ({', '.join(found)}); its convolutions and candidate selector are "
            f"not implemented: use a DFlash drafter of the same target ({_PAPER_URL})"
        )
    kind = config.get("speculators_model_type", "dflash")
    projector = config.get("projector_type", "dflash")
    if kind != "dflash" or projector != "dflash":
        raise ValueError(f"{source}: a {kind} drafter with projector {projector}; only DFlash is implemented")
    if dflash.get("use_swa"):
        raise ValueError(
            f"{source}: dflash_config.use_swa is not implemented; write the window as sliding_window, "
            "layer_types and is_causal"
        )
    if config.get("sample_from_anchor") or config.get("shift_label"):
        raise ValueError(
            f"{source}: slot 0 of this drafter predicts (sample_from_anchor or shift_label); only drafters whose "
            "slot k predicts the token at slot k are implemented"
        )


def _same_but_for_padding(one: int, other: int) -> bool:
    """Vocabularies of one tokenizer differ by padding only: under 1,024 rows and under 2 % of the whole."""
    return abs(one - other) < min(1024, max(one, other) / 50)
