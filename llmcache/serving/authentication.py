"""Who makes a request: its key, and whether that may do this. Only liveness is open."""

import base64
import binascii
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from llmcache.serving import tenants
from llmcache.serving.asgi import has_body, header_values, refuse, route_path
from llmcache.serving.keys import Keys
from llmcache.serving.refusals import Refusal
from llmcache.serving.tenants import ANYONE, Tenant

#: What everybody may ask, and by these methods alone.
OPEN: Final = frozenset((method, path) for method in ("GET", "HEAD") for path in ("/health", "/healthz"))

_ADMIN: Final = frozenset({"/", "/metrics"})
_ADMIN_FOLDER: Final = "/admin"
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_BASIC: Final = ("WWW-Authenticate", 'Basic realm="llmcache", charset="UTF-8"')


def scope_of(method: str, path: str) -> tenants.Scope | None:
    """What a key must allow for a request; None: no key is needed. Paths that no route has need one too."""
    if (method, path) in OPEN:
        return None
    return "admin" if path in _ADMIN or path.startswith(_ADMIN_FOLDER) else "infer"


class Authentication:
    """ASGI middleware: puts the tenant into the request's state, or refuses the request.

    The key comes as `Authorization: Bearer KEY`, or as the password of `Basic`, which browsers can send. Goes outside
    `Limits`: nothing of a body is read before, and limits of a tenant need the tenant.
    """

    def __init__(self, app: ASGIApp, keys: Keys | None) -> None:
        """Guard an application; without `keys` everybody is `ANYONE`."""
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008, "reason": "there are no websockets here"})
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        needed = scope_of(scope["method"], route_path(scope))
        if needed is not None:
            try:
                tenant = self._tenant(scope)
                if needed not in tenant.scopes:
                    raise Refusal("forbidden", f"this key lacks the scope {needed!r}")
            except Refusal as refusal:
                is_asked = refusal.kind == "unauthorised" and needed == "admin"
                headers = [_BASIC] if is_asked else []  # a browser asks for the key then
                await refuse(refusal, scope, receive, send, headers=headers, is_body_read=not has_body(scope))
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self.app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant:
        given = header_values(scope, b"authorization")
        scheme, _, credentials = given[0].strip().partition(b" ") if given else (b"", b"", b"")
        if scheme.lower() != b"bearer" and scope["method"] not in _READING:
            # A browser adds the password it knows, or none where none is needed, to what any page makes it send.
            _check_origin(scope)
        if self.keys is None:
            return ANYONE
        if len(given) > 1:
            raise Refusal("unauthorised", "give one Authorization header")
        key = _password(credentials) if scheme.lower() == b"basic" else credentials
        if scheme.lower() not in (b"bearer", b"basic") or not key.strip():
            raise Refusal("unauthorised", "this server needs a key: send the header Authorization: Bearer KEY")
        tenant = self.keys.find(key.strip())
        if tenant is None:
            raise Refusal("unauthorised", "this key is not known here")
        return tenant


def _password(credentials: bytes) -> bytes:
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def _check_origin(scope: Scope) -> None:
    """Refuse what a page of another site makes a browser send. Other clients send neither header."""
    site, origin = header_values(scope, b"sec-fetch-site"), header_values(scope, b"origin")
    if site:
        is_own = site[0] in (b"same-origin", b"none")
    else:
        is_own = not origin or [origin[0].partition(b"://")[2].lower()] == [
            host.lower() for host in header_values(scope, b"host")
        ]
    if not is_own:
        raise Refusal("forbidden", "a page of another site asks for this: send the key as Authorization: Bearer KEY")
