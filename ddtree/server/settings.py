"""What whoever starts the server decides about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Names on the wire and limits of the API; what the engine can do is in batch.Facts."""

    served_names: tuple[str, ...]  # the first one is the model's, the others are aliases
    target: str = ""  # as the user named it, for /stats
    drafter: str | None = None
    api_key: str | None = None
    more_api_keys: tuple[str, ...] = ()  # any of them will do
    log_prompts: bool = False
    max_body_bytes: int = 16 * 2**20
    max_sequences: int = 256  # prompts times n in one request
    keep_alive_s: float = 10.0
    ui: bool = True  # whether GET / serves the chat page
    cors_origins: tuple[str, ...] = ("*",)  # which web pages' scripts may call; () for none

    def __post_init__(self) -> None:
        if not self.served_names or not all(self.served_names):
            raise ValueError(f"a served model name must not be empty, got {self.served_names!r}")
        if self.api_key == "":
            raise ValueError('--api-key must not be empty, got "": leave it out to serve without a key')

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys that open; none means that none is wanted."""
        return self.more_api_keys if self.api_key is None else (self.api_key, *self.more_api_keys)

    @property
    def model(self) -> str:
        """The name that responses carry."""
        return self.served_names[0]
