"""A client of OpenAI-compatible servers, for audits and benchmarks; knows nothing of ddtree but what its server answers."""

from ddtree.client.answer import Answer, answer_of, answer_of_stream
from ddtree.client.http import Refused, ServerClient
from ddtree.client.noise import HttpNoise

__all__ = ["Answer", "HttpNoise", "Refused", "ServerClient", "answer_of", "answer_of_stream"]
