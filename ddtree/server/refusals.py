"""OpenAI's and its relatives' fields that change the output and are not there yet: their default passes, the rest is a 400.

Nothing is accepted and ignored. A field that is in no table here and in no model of a request changes nothing that
this server does (`user`, `store`, `metadata`, ...) and is logged at debug.
"""

from __future__ import annotations

from ddtree.server.errors import InvalidRequest, shown

SAMPLING = {
    "length_penalty": (1,),
    "repeat_penalty": (1,),
    "min_new_tokens": (0,),
    "typical_p": (1,),
    "top_a": (0,),
    "tfs": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "no_repeat_ngram_size": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "early_stopping": (False,),
    "best_of": (1,),
}
GRAMMAR = {
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "json_schema": (),
    "grammar": ("",),
    "regex": (),
}
OUTPUT = {
    "prompt_logprobs": (),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "max_new_tokens": (),
    "max_output_tokens": (),
    "n_predict": (),
}
PROMPT = {
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "lora_request": (),
}
NO_LOGPROBS = "log-probabilities come with /v1/chat/completions and /v1/completions"
REMEDIES = {
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "repeat_penalty": "use repetition_penalty",
    "max_output_tokens": "use max_tokens",
    "n_predict": "use max_tokens",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "guided_json": "use response_format",
    "json_schema": "use response_format",
    "echo": "prepend the prompt yourself",
    "thinking_token_budget": "use thinking_budget",
    "ddtree_trace": "traces come with /v1/chat/completions and /v1/completions",
    **dict.fromkeys(
        ("reasoning_effort", "reasoning", "thinking"),
        "enable_thinking turns thinking on or off, thinking_budget bounds it",
    ),
}


class Table(dict[str, tuple]):
    """Field -> the values that ask for nothing (null always does), and the remedies that this route alone knows."""

    def __init__(self, neutral: dict[str, tuple], remedies: dict[str, str] | None = None):
        super().__init__(neutral)
        self.remedies = REMEDIES | (remedies or {})


COMPLETION = Table(
    {**SAMPLING, **GRAMMAR, **OUTPUT, **PROMPT}
    | {
        "top_logprobs": (0,),
        "suffix": ("",),
        "add_special_tokens": (True,),
        "messages": (),
        "enable_thinking": (False, "false"),
        "thinking_budget": (),
        "chat_template_kwargs": ({},),
    },
    {
        "top_logprobs": "use logprobs: k",
        "messages": "messages belong to /v1/chat/completions, /v1/completions takes a prompt",
        **dict.fromkeys(
            ("enable_thinking", "thinking_budget", "chat_template_kwargs"), "/v1/completions applies no chat template"
        ),
    },
)
CHAT = Table(
    {**SAMPLING, **GRAMMAR, **OUTPUT, **PROMPT}
    | {
        "prompt": (),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "reasoning_effort": (),
        "reasoning": (),
        "thinking": (),
        "thinking_token_budget": (),
        "verbosity": ("medium",),
        "chat_template": (),
        "documents": ([],),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
    },
    {"prompt": "a prompt belongs to /v1/completions, /v1/chat/completions takes messages"},
)
RESPONSES = Table(
    {name: neutral for name, neutral in CHAT.items() if name not in ("reasoning", "max_output_tokens")}
    | {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "max_tokens": (),
        "max_completion_tokens": (),
        "max_tool_calls": (),
        "top_logprobs": (0,),
        "n": (1,),
        "logprobs": (False,),
        "messages": (),
        "response_format": (),
        "context_management": ([],),
        "return_token_ids": (False,),
        "ddtree_trace": (False,),
    },
    {
        "previous_response_id": "this server keeps no responses: send the whole conversation as input",
        "conversation": "this server keeps no conversations: send the whole of it as input",
        "prompt": "this server keeps no prompts: send input and instructions",
        "messages": "/v1/responses takes input",
        "response_format": "use text.format",
        "top_logprobs": NO_LOGPROBS,
        "logprobs": NO_LOGPROBS,
        "reasoning_effort": "use reasoning.effort",
        **dict.fromkeys(
            ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict"), "use max_output_tokens"
        ),
        **dict.fromkeys(("guided_json", "json_schema"), "use text.format"),
    },
)
MESSAGES = Table(
    {name: neutral for name, neutral in CHAT.items() if name != "thinking"}
    | {
        "n": (1,),
        "stop": (),
        "max_completion_tokens": (),
        "response_format": (),
        "output_format": (),
        "output_config": ({},),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "container": (),
        "return_token_ids": (False,),
        "ddtree_trace": (False,),
        "mcp_servers": ([],),
    },
    {
        "stop": "use stop_sequences",
        "max_completion_tokens": "use max_tokens",
        "top_logprobs": NO_LOGPROBS,
        "logprobs": NO_LOGPROBS,
        "prompt": "/v1/messages takes messages",
        **dict.fromkeys(
            ("response_format", "output_format", "output_config", "guided_json", "json_schema"),
            "JSON by a schema comes with /v1/chat/completions and /v1/responses; a tool with tool_choice does it here",
        ),
        **dict.fromkeys(("reasoning_effort", "reasoning"), "use thinking"),
    },
)
TOKENIZE = Table(
    {
        "documents": ([],),
        "chat_template": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
    }
)
NOTHING = Table({})
EXTRA_BODY = (
    "extra_body is an option of the OpenAI client, which merges what it holds into the request: on the wire, put those "
    "fields at the top level (the Python client does so for you: create(..., extra_body={...}))"
)


def refuse_unsupported(body: dict, table: Table) -> None:
    """Raise InvalidRequest for the first field that asks for something this server does not do yet."""
    if "extra_body" in body:
        raise InvalidRequest(EXTRA_BODY, "extra_body", "unsupported_parameter")
    for name, neutral in table.items():
        value = body.get(name)
        if value is None or any(_same(value, each) for each in neutral):
            continue
        remedy = table.remedies.get(name)
        if remedy is None:
            remedy = "leave it out" + (f" or at {shown(neutral[0])}" if neutral else "")
        raise InvalidRequest(
            f"{name} is not supported, got {shown(value)}: {remedy}", name, "unsupported_parameter"
        )


def _same(value: object, neutral: object) -> bool:
    """Equal as JSON: 1 and 1.0 are, 0 and false are not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
