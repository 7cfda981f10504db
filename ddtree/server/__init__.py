"""The OpenAI API over one engine."""
