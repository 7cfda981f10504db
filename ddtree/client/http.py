"""Requests to one server by its URL; every failure an error that names the URL and what it answered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

TIMEOUT_S = 600.0
TOP = 5  # log-probabilities asked for where a margin is scored


class Refused(ValueError):
    """The server answered with another status than 200; `status` is it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """`http` is an httpx.Client, for tests; one is made for `url` otherwise."""

    def __init__(self, url: str, api_key: str | None = None, http=None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if http is None:
            http = self._client(api_key)
        self.http = http

    def _client(self, api_key: str | None):
        try:
            import httpx
        except ImportError:
            raise ValueError("--url needs httpx: pip install httpx") from None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            return httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S)
        except httpx.InvalidURL as error:
            raise ValueError(f"--url {self.url}: not a URL ({error}); expected http://HOST:PORT") from None

    def close(self) -> None:
        """Close the connections that are kept open."""
        self.http.close()

    def get(self, path: str) -> dict | None:
        """The JSON at `path`; None where the server has no such route."""
        answer = self._sent(path, lambda: self.http.get(path))
        if answer.status_code in (404, 405):
            return None
        return self._checked(path, answer)

    def post(self, path: str, body: dict) -> dict:
        """The JSON answer to `body`. Refused for any other status than 200."""
        return self._checked(path, self._sent(path, lambda: self.http.post(path, json=body)))

    def stream(self, path: str, body: dict) -> Iterator[dict]:
        """The events of a streamed answer; `[DONE]` is left out."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        answer = self._sent(path, lambda: self.http.post(path, json=body))
        if answer.status_code != 200:
            self._checked(path, answer)
        for line in answer.text.splitlines():
            if line.startswith("data:") and line[5:].strip() != "[DONE]":
                yield json.loads(line[5:])

    def model(self) -> str:
        """The first model that the server names."""
        found = (self.get("/v1/models") or {}).get("data")
        if not found:
            raise ValueError(f"--url {self.url}: /v1/models names no model; is it an OpenAI-compatible server?")
        return found[0]["id"]

    def token_ids(self, body: dict) -> list[int] | None:
        """What /tokenize makes of `{"prompt": …}` or `{"messages": …}`; None where it cannot be asked."""
        try:
            return list(self.post("/tokenize", body)["tokens"])
        except (Refused, KeyError):
            return None

    def text_of(self, token_ids: Sequence[int]) -> str | None:
        """What /detokenize makes of ids, special tokens included; None where it cannot be asked."""
        try:
            return self.post("/detokenize", {"tokens": list(token_ids)})["prompt"]
        except (Refused, KeyError):
            return None

    def next_logprobs(self, token_ids: Sequence[int], model: str) -> dict[str, float] | None:
        """The target's best log-probabilities after `token_ids`, by a fresh prefill of them all; None if it gives none."""
        body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0, "logprobs": TOP, "tree_budget": 0}
        try:
            choice = self.post("/v1/completions", body)["choices"][0]
            return choice["logprobs"]["top_logprobs"][0]
        except (Refused, LookupError, TypeError):
            return None

    def _sent(self, path: str, send):
        import httpx

        try:
            return send()
        except httpx.HTTPError as error:
            raise ValueError(f"--url {self.url}{path}: no answer ({error or type(error).__name__}); is it running?") from None

    def _checked(self, path: str, answer) -> dict:
        if answer.status_code != 200:
            raise Refused(f"--url {self.url}{path}: status {answer.status_code}: {answer.text[:300]}", answer.status_code)
        try:
            return answer.json()
        except ValueError:
            raise ValueError(f"--url {self.url}{path}: not JSON: {answer.text[:200]!r}") from None
