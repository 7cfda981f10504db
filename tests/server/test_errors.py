"""One envelope for every fault, keys, names, token endpoints."""

import pytest

from tests.server.fakes import FACTS, VOCAB, ScriptEngine, serving

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client():
    with serving(max_body_bytes=2000) as client:
        yield client


def check(response, status, **expected):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    assert {name: error[name] for name in expected} == expected
    return error


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b'"x"',
    b"null",
    b"{'a': 1}",
    b'{"prompt": NaN}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"a":' * 390,
    b'{"seed": ' + b"9" * 1900,
]


@pytest.mark.parametrize("raw", MALFORMED, ids=lambda raw: repr(raw[:12]))
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_malformed_json(client, path, raw):
    check(client.request("POST", path, content=raw), 400, code="invalid_json", type="invalid_request_error")


def test_the_server_lives_on(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.complete("hi").status_code == 200


def test_infinite_numbers(client):
    check(client.request("POST", CHAT, content=b'{"messages": [], "temperature": 1e999}'), 400)


def test_missing_field(client):
    check(client.post(CHAT, {}), 400, param="messages", code="missing_required_parameter")
    check(client.post("/v1/completions", {}), 400, param="prompt")


def test_no_such_path_or_method(client):
    check(client.get("/nope"), 404, code="not_found")
    check(client.get("/v1/nope"), 404)
    error = check(client.get(CHAT), 405, code="method_not_allowed")
    assert "POST" in error["message"]


def test_head_is_get_without_a_body(client):
    for path in ("/health", "/v1/models", "/metrics", "/stats", "/version"):
        assert client.request("HEAD", path).status_code == client.get(path).status_code == 200


def test_body_too_large(client):
    check(client.complete("a" * 3000), 413, code="body_too_large")

    async def pieces():
        for _ in range(30):
            yield b"a" * 100

    check(client.request("POST", CHAT, content=pieces()), 413)


def test_a_bug_is_an_envelope_without_its_inside(client, monkeypatch):
    def broken(*args):
        raise RuntimeError("secret inside")

    monkeypatch.setattr("ddtree.server.handlers.prepare", broken)
    error = check(client.complete("hi"), 500, type="server_error")
    assert "secret" not in error["message"]


def test_models(client):
    body = client.get("/v1/models").json()
    assert body["object"] == "list" and [model["id"] for model in body["data"]] == ["toy", "org/alias"]
    assert {model["max_model_len"] for model in body["data"]} == {FACTS.max_context}
    for name in ("toy", "org/alias"):
        assert client.get(f"/v1/models/{name}").json()["id"] == name
    check(client.get("/v1/models/org/other"), 404, code="model_not_found")


def test_version(client):
    assert client.get("/version").json()["version"]


def test_tokenize_and_back(client):
    body = client.post("/tokenize", {"prompt": "hé"}).json()
    assert body == {"tokens": [104, 195, 169], "count": 3, "max_model_len": FACTS.max_context}
    assert client.post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "hé"}
    messages = [{"role": "user", "content": "hi"}]
    body = client.post("/tokenize", {"messages": messages}).json()
    assert bytes(body["tokens"]) == b"user: hi\nassistant: "


BAD_TOKENS = [("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": []}), ("/tokenize", {"messages": []})]
BAD_TOKENS += [("/detokenize", {"tokens": bad}) for bad in ([-1], [VOCAB], ["a"], 3, None, [True])]


@pytest.mark.parametrize(("path", "body"), BAD_TOKENS, ids=str)
def test_token_endpoints_refuse(client, path, body):
    check(client.post(path, body), 400)


KEYS = [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic key", "key", "Bearer key2"]


@pytest.mark.parametrize("given", KEYS)
def test_wrong_key(given):
    headers = {} if given is None else {"Authorization": given}
    with serving(api_key="key") as client:
        for path in ("/v1/models", "/v1/nope", "/v1/models/toy"):
            check(client.get(path, headers=headers), 401, code="invalid_api_key")
        check(client.post(CHAT, {}, headers=headers), 401)
        assert client.get("/health", headers=headers).status_code == 200


def test_right_key():
    with serving(ScriptEngine(), api_key="kéy") as client:
        headers = {"Authorization": "Bearer kéy".encode()}
        assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.post("/tokenize", {"prompt": "a"}, headers=headers).status_code == 200


def test_any_key_where_none_is_set(client):
    assert client.get("/v1/models", headers={"Authorization": "Bearer anything"}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_other_content_types_are_refused(kind):
    """A web page of another origin could send these without the browser asking first."""
    with serving() as client:
        response = client.request("POST", CHAT, content=b"{}", headers={"content-type": kind})
        check(response, 415, code="unsupported_media_type")
        accepted = {"content-type": "application/json; charset=utf-8"}
        assert client.request("POST", CHAT, content=b"{}", headers=accepted).status_code == 400
