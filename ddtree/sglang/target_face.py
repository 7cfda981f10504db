"""SGLang's target as our drafter sees it: embedding, head, vocabulary. Sharded over tensor-parallel ranks or whole."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from sglang.srt.distributed import get_tp_group, tensor_model_parallel_all_gather


class TargetFace:
    """What `DFlash` asks of a target (`models.target_model`), answered by a model of SGLang's on every rank alike."""

    def __init__(self, model_runner) -> None:
        self.model, text = model_runner.model, model_runner.model_config.hf_text_config
        self.config = SimpleNamespace(
            hidden_size=text.hidden_size, num_layers=text.num_hidden_layers, vocab_size=text.vocab_size
        )
        self.group = get_tp_group()
        self.device, self.dtype = torch.device(model_runner.device), model_runner.dtype
        # An adapter looks rows up as often as its tree is deep, which may differ between ranks by a last bit: with a table
        # of their own none waits for another.
        self.reads_whole = False

    @cached_property
    def embed_tokens(self) -> torch.Tensor:
        """The whole embedding [V, C], for an adapter's tables."""
        return self._whole(self.model.get_input_embeddings().weight)

    @cached_property
    def lm_head(self) -> SimpleNamespace:
        """The whole head, `weight` [V, C], likewise."""
        head = self.model.lm_head
        tied = head is self.model.get_input_embeddings()
        return SimpleNamespace(weight=self.embed_tokens if tied else self._whole(head.weight))

    def _whole(self, shard: torch.Tensor) -> torch.Tensor:
        """A table of which each rank has as many rows; padding comes last."""
        whole = tensor_model_parallel_all_gather(shard, dim=0) if self.group.world_size > 1 else shard
        return whole[: self.config.vocab_size]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[..] int64 -> [.., C]."""
        if self.reads_whole or self.group.world_size == 1:
            return F.embedding(token_ids, self.embed_tokens)
        return self.model.get_input_embeddings()(token_ids.flatten()).view(*token_ids.shape, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., C] after the final norm -> [.., V]; every rank gets all of them."""
        head = self.model.lm_head
        rows = hidden.flatten(0, -2)
        method = getattr(head, "quant_method", None)
        local = rows.to(head.weight.dtype) @ head.weight.T if method is None else method.apply(head, rows, None)
        if self.group.world_size > 1:
            local = tensor_model_parallel_all_gather(local)
        return local[:, : self.config.vocab_size].view(*hidden.shape[:-1], -1)

    def share(self, *tensors: torch.Tensor) -> None:
        """Overwrite `tensors`, which lie on the device, with the first rank's."""
        if self.group.world_size > 1:
            for tensor in tensors:
                torch.distributed.broadcast(tensor, src=self.group.ranks[0], group=self.group.device_group)

    def agree(self, numbers: np.ndarray) -> np.ndarray:
        """The first rank's `numbers` (int64, of the same shape everywhere), so that no last bit parts the ranks."""
        if self.group.world_size == 1:
            return numbers
        shared = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64).copy())
        torch.distributed.broadcast(shared, src=self.group.ranks[0], group=self.group.cpu_group)
        return shared.numpy()
