"""The chat page: the files of ui/ as they are, under a policy that lets the page talk to this server alone."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The files change with the server's version, under the same names.
    "Cache-Control": "no-cache",
}


def install(app: FastAPI) -> None:
    """GET / and the files that the page asks for. No key is needed to see it; what it then asks is guarded."""
    served = {file.name: file.read_bytes() for file in files("ddtree.server").joinpath("ui").iterdir() if file.is_file()}

    def route(path: str, name: str) -> Route:
        kind = KINDS[name.rpartition(".")[2]]

        async def answer(request: Request) -> Response:
            return Response(served[name], media_type=kind, headers=HEADERS)

        return Route(path, answer, methods=["GET"], include_in_schema=False)

    app.router.routes.append(route("/", "index.html"))
    app.router.routes.extend(route(f"/ui/{name}", name) for name in sorted(served))
