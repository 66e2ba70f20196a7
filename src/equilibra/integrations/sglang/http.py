"""Talking to an inference server: JSON over HTTP with the standard library, with limits on time and size.

A server that refuses connections may be starting: it is asked again until the time is over. Nothing else is repeated,
for an answer that was lost may have been given.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from equilibra.core.errors import ExecuteError, InputError

__all__ = ["Server", "check_url"]

PAUSE_S = 0.5
SAID = 300


def check_url(url: str) -> str:
    """The address of a server, without a slash at its end."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise InputError(f"the address of a server must be as http://127.0.0.1:30000, not {url!r:.100}")
    return url.rstrip("/")


@dataclass(frozen=True, kw_only=True)
class Server:
    """One server."""

    url: str
    """as http://127.0.0.1:30000"""
    timeout_s: float
    """for an answer, and for a server that is starting"""
    clock: Callable[[], float] = monotonic
    """seconds"""
    pause: Callable[[float], None] = sleep
    """waits for some seconds"""

    def post(self, path: str, body: object, *, max_bytes: int) -> Any:  # noqa: ANN401 - whatever JSON it answers
        """What the server answers, of at most so many bytes."""
        request = Request(  # noqa: S310 - `check_url` allows http and https only
            f"{self.url}{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        content = self._answer(request, max_bytes)
        if len(content) > max_bytes:
            raise InputError(
                f"{self.url}{path} answered more than the {max_bytes:,} bytes that there can be: does it serve the "
                "model that is trained, and return no more than it is asked for?"
            )
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.url}{path} answered no JSON ({str(error)[:120]}): {content[:80]!r}") from error

    def _answer(self, request: Request, max_bytes: int) -> bytes:
        end, opener = self.clock() + self.timeout_s, build_opener(ProxyHandler({}))
        while True:
            try:
                return self._once(opener, request, max_bytes)
            except ConnectionRefusedError as error:
                if self.clock() + PAUSE_S > end:
                    raise ExecuteError(
                        f"no server answered at {self.url} within {self.timeout_s:g} s (connection refused): start it "
                        "there, or set rollout.server"
                    ) from error
                self.pause(PAUSE_S)

    def _once(self, opener: OpenerDirector, request: Request, max_bytes: int) -> bytes:
        try:
            with opener.open(request, timeout=self.timeout_s) as answer:
                content: bytes = answer.read(max_bytes + 1)
                return content
        except HTTPError as error:
            with error:
                said = error.read(SAID).decode(errors="replace")
            raise InputError(f"{request.full_url} refused: {error.code} {error.reason}: {said}") from error
        except URLError as error:
            if isinstance(error.reason, ConnectionRefusedError):
                raise error.reason from error
            raise ExecuteError(f"{request.full_url} cannot be reached: {error.reason}") from error
        except (TimeoutError, HTTPException, ConnectionError) as error:
            raise ExecuteError(
                f"{request.full_url} did not answer within {self.timeout_s:g} s, or broke off "
                f"({type(error).__name__}: {error}): look at the server, or raise rollout.server_timeout_s"
            ) from error
