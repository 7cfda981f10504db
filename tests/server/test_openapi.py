"""The server against its own OpenAPI document: whatever is sent, no 500, no answer that the document does not allow."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from ddtree.server.openapi import ROUTES, document
from tests.server.fakes import ScriptEngine, serving

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
SCHEMA = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def client():
    with serving(ScriptEngine("hello")) as client:
        yield client


@SCHEMA.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_500_and_no_surprise(client, case):
    response = client.request(case.method, case.formatted_path, **_sent(case))
    case.validate_response(response, checks=CHECKS)


def _sent(case):
    """The body as JSON text, also where it is no object."""
    if case.method == "GET":
        return {}
    try:
        return {"content": json.dumps(case.body), "headers": {"content-type": "application/json"}}
    except TypeError:
        return {"content": b"", "headers": {"content-type": "application/json"}}


def test_the_document_names_every_route(client):
    served = client.get("/openapi.json").json()
    assert served == document() and set(served["paths"]) == {path for _, path, *_ in ROUTES}
    known = {
        (route.path.replace(":path", ""), method)
        for route in client.app.routes
        for method in route.methods - {"HEAD"}
        if getattr(route, "include_in_schema", False)  # the chat page is no API
    }
    named = {(path, method.upper()) for method, path, *_ in ROUTES} | {("/openapi.json", "GET")}
    assert named == known
