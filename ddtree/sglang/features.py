"""Which layers SGLang's target hands out to our drafter."""

from __future__ import annotations

from collections.abc import Sequence


def capture(model, num_layers: int, layer_ids: Sequence[int]) -> None:
    """Have `model`, one of SGLang's, hand out the outputs of these layers, as DFlash counts them.

    ValueError where it cannot.
    """
    if max(layer_ids) >= num_layers - 1:
        raise ValueError(
            f"the drafter's target_layer_ids {list(layer_ids)} hold the last layer, {num_layers - 1}, whose output SGLang does "
            "not hand out; serve this target with ddtree's own engine"
        )
    body = getattr(model, "model", None)
    if hasattr(model, "set_dflash_layers_to_capture"):
        model.set_dflash_layers_to_capture(list(layer_ids))
    elif hasattr(body, "set_dflash_layers_to_capture"):
        # The text-only Qwen3.5 of 0.5.17: its body counts layers by what goes into them.
        body.set_dflash_layers_to_capture([layer_id + 1 for layer_id in layer_ids])
    else:
        raise ValueError(
            f"SGLang's {type(model).__name__} has no set_dflash_layers_to_capture, so no features for a DFlash drafter; "
            "serve this target with ddtree's own engine"
        )
