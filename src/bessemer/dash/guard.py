"""Who may ask, and what a browser may do with the answer.

- Reading: on 127.0.0.1 anybody who can reach it, under this machine's own names only (or a page elsewhere could make
  its name point here). On any other address, and with `private`, who has the token.
- Acting (stop, resume, load a model): the token, in a header that no other site's page can send, and the same origin.
- The page itself holds no data, so it needs no token: it asks for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from bessemer.serve.errors import ApiError
from bessemer.serve.net import has_token, refuse_other_names, refuse_without_token

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


@dataclass(frozen=True)
class Guard:
    """`closed`: reading needs the token too."""

    token: str
    closed: bool = False

    def page(self, request: Request) -> None:
        if not self.closed:
            refuse_other_names(request)

    def reading(self, request: Request) -> None:
        if self.closed:
            refuse_without_token(request, self.token)
        else:
            refuse_other_names(request)
        _refuse_other_sites(request)

    def acting(self, request: Request) -> None:
        self.reading(request)
        refuse_without_token(request, self.token)

    def allows(self, request: Request) -> bool:
        """Whether whoever asks may act."""
        return has_token(request, self.token)


def _refuse_other_sites(request: Request) -> None:
    """A browser says where a request comes from; only our own page asks here."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        raise ApiError(403, "requests of other sites are not answered.", code="origin")
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise ApiError(403, "requests of other sites are not answered.", code="origin")
