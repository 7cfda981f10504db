"""What the plugin needs of the installed SGLang, looked for before a server starts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

RUN_WITH = "0.5.23"  # the release that the tests run (docs/sglang.md)


@dataclass(frozen=True)
class Hook:
    """A name in SGLang, and the parameters that it must take."""

    module: str
    name: str  # dotted within the module
    parameters: tuple[str, ...] = ()
    former_name: str | None = None  # what older releases call it

    def __str__(self) -> str:
        taking = f" taking {', '.join(self.parameters)}" if self.parameters else ""
        return f"{self.module}.{self.name}{taking}"


_SPECULATIVE, _MANAGERS = "sglang.srt.speculative", "sglang.srt.managers"

REGISTRY = (
    Hook(f"{_SPECULATIVE}.spec_info", "SpeculativeAlgorithm.register", ("supports_overlap", "spec_class")),
    Hook(f"{_SPECULATIVE}.spec_registry", "CustomSpecAlgo.handle_server_args"),
    Hook(f"{_SPECULATIVE}.spec_registry", "CustomSpecAlgo.is_ngram"),
)
WORKER = (
    Hook(f"{_SPECULATIVE}.base_spec_worker", "BaseSpecWorker.alloc_memory_pool"),
    Hook(
        f"{_SPECULATIVE}.ngram_info",
        "NgramVerifyInput",
        (
            "draft_token", "custom_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling",
            "draft_token_num", "new_seq_lens", "accept_tokens", "accept_lens",
        ),
    ),
    Hook(f"{_SPECULATIVE}.spec_utils", "prepare_mamba_track_for_verify"),
    Hook(
        f"{_SPECULATIVE}.spec_utils",
        "commit_mamba_states_after_verify",
        ("target_worker", "batch", "accept_lens", "accept_index", "draft_token_num"),
    ),
    Hook(
        "sglang.srt.layers.logprob_processor",
        "compute_spec_logprobs",
        ("predict", "accept_index"),
        former_name="compute_spec_v2_logprobs",
    ),
    Hook(f"{_MANAGERS}.overlap_utils", "FutureMap"),
    Hook(f"{_MANAGERS}.schedule_batch", "FINISH_ABORT", ("message", "status_code", "err_type")),
    Hook(
        f"{_MANAGERS}.tp_worker",
        "TpModelWorker.forward_batch_generation",
        ("batch", "is_verify", "capture_hidden_mode"),
    ),
    Hook(
        f"{_MANAGERS}.utils",
        "GenerationBatchResult",
        (
            "logits_output", "next_token_ids", "can_run_cuda_graph", "accept_lens", "new_seq_lens", "next_draft_input",
            "speculative_num_draft_tokens",
        ),
    ),
    Hook("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.move_kv_cache", ("tgt_loc", "src_loc")),
    Hook("sglang.srt.model_executor.forward_batch_info", "ForwardMode.TARGET_VERIFY"),
    Hook("sglang.srt.model_executor.forward_batch_info", "CaptureHiddenMode.FULL"),
    Hook("sglang.srt.layers.attention.attention_registry", "register_attention_backend"),
    Hook("sglang.srt.layers.attention.torch_native_backend", "TorchNativeAttnBackend.forward_extend"),
    Hook("sglang.srt.distributed", "tensor_model_parallel_all_gather"),
    Hook("sglang.srt.distributed", "get_tp_group"),
)


def missing(
    hooks: Sequence[Hook], load: Callable[[str], object] = importlib.import_module
) -> list[str]:
    """The hooks that the installed SGLang lacks, each with what is wrong."""
    found = (_fault(hook, load) for hook in hooks)
    return [fault for fault in found if fault]


def refusal(absent: Sequence[str]) -> str:
    """What to say where hooks are missing."""
    try:
        installed = f"sglang {version('sglang')}"
    except PackageNotFoundError:
        installed = "no released sglang"
    listed = "\n".join(f"  - {each}" for each in absent)
    return (
        f"--speculative-algorithm DDTREE cannot run here: {installed} is installed, and it lacks\n{listed}\n"
        f'Install the version that the plugin was run with (pip install "sglang=={RUN_WITH}"), or serve with ddtree\'s own engine.'
    )


def _fault(hook: Hook, load: Callable[[str], object]) -> str | None:
    try:
        found = load(hook.module)
    except ImportError as error:
        return f"{hook} ({error})"
    name = hook.name
    if hook.former_name and not hasattr(found, name):
        name = hook.former_name
    for part in name.split("."):
        if not hasattr(found, part):
            return str(hook)
        found = getattr(found, part)
    taken = _parameters(found) if hook.parameters else None
    absent = [name for name in hook.parameters if taken is not None and name not in taken]
    return f"{hook}: it does not take {', '.join(absent)}" if absent else None


def _parameters(found: object) -> set[str] | None:
    """The names that a function or class takes; None where it takes any."""
    parameters = inspect.signature(found).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return {each.name for each in parameters}
