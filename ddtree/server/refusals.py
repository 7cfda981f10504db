"""OpenAI's and its relatives' fields that change the output and are not there yet: their default passes, the rest is a 400.

Nothing is accepted and ignored. A field that is in no table here and in no model of a request changes nothing that
this server does (`user`, `store`, `metadata`, ...) and is logged at debug.
"""

from __future__ import annotations

from ddtree.server.errors import InvalidRequest, shown

# field -> the values that ask for nothing. null always does.
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
    "cache_prompt": (True, False),
}
COMPLETION = {**SAMPLING, **GRAMMAR, **OUTPUT, **PROMPT} | {
    "top_logprobs": (0,),
    "suffix": ("",),
    "add_special_tokens": (True,),
    "messages": (),
    "enable_thinking": (False, "false"),
    "chat_template_kwargs": ({},),
}
CHAT = {**SAMPLING, **GRAMMAR, **OUTPUT, **PROMPT} | {
    "prompt": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "reasoning": (),
    "thinking": (),
    "thinking_budget": (),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
}
RESPONSES = {name: neutral for name, neutral in CHAT.items() if name not in ("reasoning", "max_output_tokens")} | {
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
}
MESSAGES = {name: neutral for name, neutral in CHAT.items() if name != "thinking"} | {
    "n": (1,),
    "stop": (),
    "max_completion_tokens": (),
    "response_format": (),
    "output_format": (),
    "output_config": ({},),
    "logprobs": (False,),
    "container": (),
    "return_token_ids": (False,),
    "ddtree_trace": (False,),
    "mcp_servers": ([],),
}
TOKENIZE: dict[str, tuple] = {
    "documents": ([],),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
EXTRA_BODY = (
    "extra_body is an option of the OpenAI client, which merges what it holds into the request: on the wire, put those "
    "fields at the top level (the Python client does so for you: create(..., extra_body={...}))"
)
REMEDIES = {
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "repeat_penalty": "use repetition_penalty",
    "top_logprobs": "use logprobs: k",
    "max_output_tokens": "use max_tokens",
    "n_predict": "use max_tokens",
    "messages": "messages belong to /v1/chat/completions, /v1/completions takes a prompt",
    "prompt": "a prompt belongs to /v1/completions, /v1/chat/completions takes messages",
    "enable_thinking": "/v1/completions applies no chat template",
    "chat_template_kwargs": "/v1/completions applies no chat template",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "guided_json": "use response_format",
    "json_schema": "use response_format",
    "previous_response_id": "this server keeps no responses: send the whole conversation as input",
    "max_completion_tokens": "it has another name here: max_output_tokens or max_tokens",
    "response_format": "it has another name here: text.format",
    "stop": "use stop_sequences",
    "echo": "prepend the prompt yourself",
    "ddtree_trace": "traces come with /v1/chat/completions and /v1/completions",
    **dict.fromkeys(
        ("reasoning_effort", "reasoning", "thinking", "thinking_budget", "thinking_token_budget"),
        "enable_thinking turns thinking on or off, max_tokens bounds thought and answer together",
    ),
}


def refuse_unsupported(body: dict, table: dict[str, tuple]) -> None:
    """Raise InvalidRequest for the first field that asks for something this server does not do yet."""
    if "extra_body" in body:
        raise InvalidRequest(EXTRA_BODY, "extra_body", "unsupported_parameter")
    for name, neutral in table.items():
        value = body.get(name)
        if value is None or any(_same(value, each) for each in neutral):
            continue
        remedy = REMEDIES.get(name)
        if remedy is None:
            remedy = "leave it out" + (f" or at {shown(neutral[0])}" if neutral else "")
        raise InvalidRequest(
            f"{name} is not supported, got {shown(value)}: {remedy}", name, "unsupported_parameter"
        )


def _same(value: object, neutral: object) -> bool:
    """Equal as JSON: 1 and 1.0 are, 0 and false are not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
