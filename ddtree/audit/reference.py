"""transformers beside us: its greedy answer, and layer by layer where ours differs. The audit's one outside witness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ddtree.audit.compare import row_errors, tolerance
from ddtree.audit.observe import run_alone

# Parts of a layer in the order of computation, by our names; and what transformers may call the same one.
PARTS = {
    "input_layernorm": "input norm", "self_attn": "attention", "mixer": "attention",
    "post_attention_layernorm": "norm before the MLP", "mlp": "MLP",
}  # fmt: skip
SAME = {"mixer": ("self_attn", "linear_attn")}
MOST_BYTES = 4 << 30  # a second copy of the weights; larger targets are not loaded twice by themselves


class Reference:
    """A transformers model of the same files, on the same device, in the same dtype."""

    def __init__(self, model, eos_token_ids: Sequence[int]) -> None:
        self.model, self.eos_token_ids = model, sorted(eos_token_ids)

    @classmethod
    def load(cls, path: Path, device, dtype: torch.dtype, eos_token_ids) -> Reference:
        """ValueError where transformers cannot read the files."""
        from transformers import AutoModelForCausalLM

        place = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, trust_remote_code=False, **place)
        except Exception as error:  # transformers raises whatever its parsers raise
            raise ValueError(f"{path}: transformers cannot load it ({type(error).__name__}: {error})") from error
        return cls(model.to(device).eval(), eos_token_ids)

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Its greedy answer, the stop token kept."""
        ids = torch.tensor([list(prompt)], device=self.model.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=self.eos_token_ids or None,
            pad_token_id=self.eos_token_ids[0] if self.eos_token_ids else 0,
        )
        return output[0, ids.shape[1] :].tolist()

    @torch.inference_mode()
    def along(self, prompt: Sequence[int], answer: Sequence[int], max_tokens: int) -> list[int]:
        """What `self(prompt, max_tokens)` writes, up to its first difference from `answer`, in one forward over both.

        By induction that is greedy decoding; an answer that goes past a stop, or ends without one, differs there.
        """
        ids = torch.tensor([[*prompt, *answer]], device=self.model.device)
        chosen = self.model(ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0].argmax(-1).tolist()[:max_tokens]
        for i, token in enumerate(chosen):
            if token in self.eos_token_ids or i == len(answer) or token != answer[i]:
                return chosen[: i + 1]
        return chosen

    @torch.inference_mode()
    def hidden_states(self, token_ids: Sequence[int]) -> list[torch.Tensor]:
        """[T, C] each: the embedding, then every layer's output, the last one after the final norm."""
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        return [states[0] for states in self.model(ids, output_hidden_states=True, use_cache=False).hidden_states]

    @torch.inference_mode()
    def parts(self, token_ids: Sequence[int]) -> dict[tuple[int, str], torch.Tensor]:
        """(layer, child module's name) -> its result over the tokens, [T, ..]."""
        found, handles = {}, []

        def hook(layer: int, name: str):
            def keep(module, args, output) -> None:
                result = output[0] if isinstance(output, tuple) else output
                if torch.is_tensor(result):
                    found[layer, name] = result[0].detach().clone() if result.dim() == 3 else result.detach().clone()

            return keep

        for layer, block in enumerate(getattr(self.model.base_model, "layers", ())):
            handles += [child.register_forward_hook(hook(layer, name)) for name, child in block.named_children()]
        try:
            self.hidden_states(token_ids)
        finally:
            for handle in handles:
                handle.remove()
        return found


def where_it_differs(model, reference: Reference, token_ids: Sequence[int]) -> str | None:
    """The first part, in the order of computation, whose result over these tokens is not transformers'; None if all agree."""
    theirs, parts = reference.hidden_states(token_ids), reference.parts(token_ids)
    ours = run_alone(model, token_ids)[0]
    limit, num_layers = 4 * tolerance(ours.hidden.dtype), len(theirs) - 1
    lead = "plain decoding against transformers:"
    embedding = model.embed(ours.rows.token_ids)
    if float(row_errors(embedding, theirs[0]).max()) > limit:
        return f"{lead} the embedding differs"
    for layer in range(num_layers):
        for name, label in PARTS.items():
            due = next((parts[layer, other] for other in (name, *SAME.get(name, ())) if (layer, other) in parts), None)
            held = ours.parts.get((layer, name))
            if due is not None and held is not None and held.shape == due.shape:
                errors = row_errors(held, due)
                if float(errors.max()) > limit:
                    token = int((errors > limit).nonzero()[0])
                    return f"{lead} layer {layer} {label} differs from token {token} on ({float(errors.max()):.2g})"
        error = float(row_errors(ours.layer_output(layer, num_layers), theirs[layer + 1]).max())
        if error > limit:
            return f"{lead} layer {layer}'s output differs ({error:.2g})"
    return None


def fits(path: Path) -> bool:
    """Whether a second copy of the weights is a small matter."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    size = sum(file.stat().st_size for file in files)
    return 0 < size * (7 if path.is_file() else 1) <= MOST_BYTES  # a GGUF is read into whole floats
