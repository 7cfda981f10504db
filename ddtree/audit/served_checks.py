"""Checks of single answers from a server: counts, prompt, stream, and where a stop can be forged."""

from __future__ import annotations

from ddtree.audit.prompts import CHAT
from ddtree.client import Answer, Refused, ServerClient, answer_of

PIECE = 4  # characters of a forged stop string


def count_fault(answer: Answer) -> str | None:
    """Counts that do not agree with the tokens or with each other."""
    ids, report = answer.token_ids, answer.report
    if ids is not None and answer.output_tokens is not None and len(ids) != answer.output_tokens:
        return f"usage counts {answer.output_tokens} completion tokens, there are {len(ids)} ids"
    if report is None:
        return None
    if answer.output_tokens is not None and report.get("output_tokens") != answer.output_tokens:
        return f"ddtree.output_tokens is {report.get('output_tokens')}, usage says {answer.output_tokens}"
    emitted = sum(length * count for length, count in answer.histogram.items())
    if report.get("output_tokens") and report["output_tokens"] != 1 + emitted - report.get("trimmed_tokens", 0):
        return f"{report['output_tokens']} output tokens, but 1 + {emitted} in the histogram - {report.get('trimmed_tokens')} trimmed"
    return None


def prompt_faults(client: ServerClient, case, plain: Answer, is_ddtree: bool) -> list[str]:
    """Two BOS tokens, a template in a raw completion, a count that is not the prompt's."""
    chat = {"messages": [{"role": "user", "content": case.text}]}
    if case.form == CHAT:
        body = chat if case.thinking is None else chat | {"enable_thinking": case.thinking}
    else:
        body = {"prompt": case.text}
    ids = client.token_ids(body)
    found = []
    if ids is not None:
        if plain.prompt_tokens is not None and len(ids) != plain.prompt_tokens:
            found.append(f"usage counts {plain.prompt_tokens} prompt tokens, /tokenize makes {len(ids)} of it")
        first = client.text_of(ids[:1]) or ""
        if len(ids) > 1 and ids[0] == ids[1] and first.startswith("<") and first.endswith(">"):
            found.append(f"two BOS tokens ({first}) at its start")
    if case.form != CHAT:
        text = client.text_of(ids) if ids is not None else None
        rendered = client.token_ids(chat) if is_ddtree else None
        if ids is not None and rendered == ids:
            found.append("a chat template was applied to a raw completion: /tokenize makes the same ids of both")
        elif text is not None and case.text.strip() not in text:
            found.append(f"its ids read {text[:120]!r}")
        elif ids is None and plain.prompt_tokens is not None and _chat_tokens(client, case) == plain.prompt_tokens:
            found.append(
                f"a chat template was applied to a raw completion: as a chat and raw it has {plain.prompt_tokens} prompt tokens"
            )
    return found


def _chat_tokens(client: ServerClient, case) -> int | None:
    body = {"model": client.model(), "messages": [{"role": "user", "content": case.text}], "max_tokens": 1, "temperature": 0}
    try:
        return answer_of(client.post("/v1/chat/completions", body)).prompt_tokens
    except Refused:
        return None


def stream_fault(plain: Answer, streamed: Answer) -> str | None:
    """Deltas that do not add up to the answer that comes whole."""
    for name in ("text", "thought", "finish_reason", "token_ids", "output_tokens"):
        whole, parts = getattr(plain, name), getattr(streamed, name)
        if None not in (whole, parts) and whole != parts:
            return f"streamed, its {name} is {str(parts)[-80:]!r}; whole it is {str(whole)[-80:]!r}"
    return None


def stop_piece(plain: Answer) -> str | None:
    """A stop string from the middle of an answer; None where the answer is too short for one, or holds a thought."""
    if plain.thought or len(plain.text) < 3 * PIECE:
        return None
    start = len(plain.text) // 2
    piece = plain.text[start : start + PIECE]
    return piece if piece.strip() and "\ufffd" not in piece else None
