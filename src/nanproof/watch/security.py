"""Who may talk to the page: only what the browser on this machine asks for with the token in the address.

A page on another site can make a browser send requests to this machine, and a name server can make a foreign name
point to it. So the Host header must be one of ours, an Origin must be ours, methods only read, and every path begins
with a token that nobody else knows.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class Gatekeeper:
    """Lets through what may pass, and puts the protecting headers on every answer."""

    def __init__(self, app: App, *, token: str, hosts: frozenset[str]) -> None:
        self._app, self._token, self._hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websockets here
            return

        async def protected(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, protected)
            return
        status, words = refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        await protected({"type": "http.response.start", "status": status, "headers": headers})
        await protected({"type": "http.response.body", "body": words})

    def _refusal(self, scope: Scope) -> tuple[int, bytes] | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [v.decode("latin-1") for k, v in headers if k == b"host"]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return 421, b"this name is not served here"
        for key, value in headers:
            if key == b"origin" and value.decode("latin-1") not in {f"http://{h}" for h in self._hosts}:
                return 403, b"other sites may not ask"
        if any(key == b"upgrade" for key, _ in headers):
            return 400, b"this page speaks no other protocol"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, b"this page only shows"
        given = scope["path"].split("/", 2)[1:2]
        if not given or not hmac.compare_digest(given[0].encode(), self._token.encode()):
            return 404, b"nothing here; the address that nanproof printed ends in a token"
        return None
