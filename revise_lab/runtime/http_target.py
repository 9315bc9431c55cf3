"""A target behind HTTP: the server compares and sets, with ETag and If-Match.

What is asked of the server, with the intent key, percent-encoded, as ``Idempotency-Key`` of every publication:

- ``POST {base}/effects``: publish an intent without premises.
- ``POST {base}/{resource}`` with ``If-Match``: publish one whose premise is that resource. A precondition speaks of the
  resource in the address, so there can be only one.
- ``POST {base}/{transactions}`` with ``intent_key``, ``payload`` and ``premises``: one with several, if there is that.
- ``GET`` and ``DELETE {base}/effects/{key}``: find and compensate; both answer with ``payload`` and ``state``. With
  ``?close=true`` a key that is not there is closed: a publication that arrives under it later gets 410.
- ``HEAD {base}/{resource}``: the strong ``ETag`` is the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2

from revise_lab.errors import ConfigError, ValueNotCanonical
from revise_lab.records.effect import EffectState
from revise_lab.records.value import freeze, thaw
from revise_lab.runtime.target import (
    ABSENT_TOKEN,
    OutcomeUnknown,
    PremiseChanged,
    Receipt,
    TargetError,
    arrived,
    check_premises,
    closed,
    first_receipt,
    not_published,
    premise_changed,
)

_STRONG = re.compile(r'"[ !#-~]*"')
_SAID = (EffectState.CONFIRMED, EffectState.COMPENSATED, EffectState.DROPPED)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class HttpTarget:
    """A target behind HTTP.

    Parameters
    ----------
    base_url : str
        Where it is.
    name : str
        Its name.
    transactions : str, optional
        Path at which the server checks several premises and publishes in one step.
    compares_and_sets : bool
        False for a server that does not heed ``If-Match`` and ``Idempotency-Key``.
    headers : mapping, optional
        Further headers, such as a key; they are kept out of messages.
    timeout_s : float
        Longest silence of the server.

    Raises
    ------
    ConfigError
        The URL is not http or https.
    """

    def __init__(
        self,
        base_url: str,
        name: str = "http",
        *,
        transactions: str | None = None,
        compares_and_sets: bool = True,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        try:
            host, _ = (parts := urlsplit(base_url)).hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            # It may hold a password, so it is not quoted.
            raise ConfigError(f"target {name!r}: its base_url is no address - give one like http://127.0.0.1:8000")
        self.name, self.compares_and_sets, self.transactions = name, compares_and_sets, transactions
        # A proxy from the environment must not stand between us and our own machine.
        self._client = httpx2.Client(
            base_url=base_url.rstrip("/"), headers=headers, timeout=timeout_s, trust_env=host not in _LOOPBACK
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def publish(self, intent_key: str, payload: object, premises: Mapping[str, str]) -> Receipt:
        """Publish an intent if its premise holds; see :class:`revise_lab.runtime.target.Target`."""
        check_premises(self.name, intent_key, premises)
        value = freeze(payload)
        headers = {"idempotency-key": quote(intent_key, safe=""), "content-type": "application/json"}
        body, path = thaw(value), "/effects"
        if len(premises) == 1:
            ((resource, token),) = premises.items()
            path = _path(resource)
            headers |= {"if-none-match": "*"} if token == ABSENT_TOKEN else {"if-match": token}
        elif premises:
            if self.transactions is None:
                raise TargetError(
                    f"{self.name}: {intent_key} has the premises {', '.join(sorted(premises))}, and HTTP can check one -"
                    " give the path at which the server takes transactions, or use a SqlTarget; nothing was sent",
                    names=tuple(sorted(premises)),
                )
            path = _path(self.transactions)
            body = {"intent_key": intent_key, "payload": body, "premises": dict(premises)}
        answer = self._send("POST", path, headers=headers, content=json.dumps(body).encode())
        if answer.status_code in (202, 301, 302, 303):
            raise OutcomeUnknown(
                f"{self.name}: {intent_key} was answered with {answer.status_code}, which does not say that it was"
                " published - ask what became of it"
            )
        if answer.is_success:
            return Receipt(intent_key, value, EffectState.CONFIRMED)
        if answer.status_code == 410:
            return first_receipt(self.name, closed(intent_key), value)
        if answer.status_code in (409, 412, 422):
            # A server that checks the precondition first refuses also what it has already done.
            known = self.find(intent_key)
            if known is not None:
                return first_receipt(self.name, known, value)
            if answer.status_code == 412:
                raise self._changed(answer, intent_key, premises)
            if answer.status_code == 409:
                raise OutcomeUnknown(f"{self.name}: {intent_key} is still in progress there - ask what became of it")
        raise self._refused(answer, f"publish {intent_key}")

    def find(self, intent_key: str, *, close: bool = False) -> Receipt | None:
        """Say what became of an intent; None if it never arrived, and with ``close`` never will."""
        answer = self._send("GET", f"/effects/{quote(intent_key, safe='')}{'?close=true' * close}")
        return None if answer.status_code in (404, 410) else arrived(self._receipt(answer, intent_key))

    def compensate(self, intent_key: str) -> Receipt:
        """Undo a publication; again is the same as once."""
        answer = self._send("DELETE", f"/effects/{quote(intent_key, safe='')}")
        if answer.status_code == 404:
            raise not_published(self.name, intent_key)
        if answer.is_client_error:
            raise self._refused(answer, f"compensate {intent_key}")
        return self._receipt(answer, intent_key)

    def token(self, resource: str) -> str:
        """Return the present token of a resource."""
        answer = self._send("HEAD", _path(resource))
        if answer.status_code == 404:
            return ABSENT_TOKEN
        tag = str(answer.headers.get("etag", ""))
        if not answer.is_success or not _STRONG.fullmatch(tag):
            raise TargetError(
                f"{self.name}: {resource} has no strong ETag (status {answer.status_code}, ETag {tag or 'missing'}), so it"
                " cannot be a premise - let the server send one",
                resource=resource,
            )
        return tag

    def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        if {".", ".."} & {*path.partition("?")[0].split("/")}:
            raise TargetError(
                f"{self.name}: {method} {path} would go to another place than it names - rename it; nothing was sent"
            )
        try:
            answer = self._client.request(method, path, **options)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.InvalidURL) as error:
            # Nothing left our machine; only a question stays open.
            kind = OutcomeUnknown if method in ("GET", "HEAD") else TargetError
            address = self._client.base_url.copy_with(userinfo=b"")  # that is a password
            raise kind(f"{self.name}: nobody answers at {address} ({error}) - start it, try again") from None
        except httpx2.RequestError as error:
            raise OutcomeUnknown(
                f"{self.name}: {method} {path} got no answer ({type(error).__name__}) - ask what became of it"
            ) from None
        if answer.status_code >= 500:
            raise OutcomeUnknown(
                f"{self.name}: {method} {path} failed with {answer.status_code} - ask what became of it"
            )
        return answer

    def _receipt(self, answer: httpx2.Response, intent_key: str) -> Receipt:
        try:
            found = answer.raise_for_status().json()
            return Receipt(intent_key, freeze(found["payload"]), _SAID[_SAID.index(found["state"])])
        except (httpx2.HTTPStatusError, KeyError, TypeError, ValueError, RecursionError, ValueNotCanonical):
            raise OutcomeUnknown(
                f"{self.name}: what it says of {intent_key} (status {answer.status_code}) cannot be understood - it should"
                " answer with payload and state; look there",
                intent_key=intent_key,
            ) from None

    def _changed(self, answer: httpx2.Response, intent_key: str, premises: Mapping[str, str]) -> PremiseChanged:
        try:
            names = [str(name) for name in answer.json()["changed"]]
        except (KeyError, TypeError, ValueError, RecursionError):
            names = sorted(premises)
        return premise_changed(self.name, intent_key, names)

    def _refused(self, answer: httpx2.Response, what: str) -> TargetError:
        return TargetError(
            f"{self.name} refused to {what}: status {answer.status_code} - nothing happened; see its log"
        )


def _path(resource: str) -> str:
    return "/" + quote(resource.lstrip("/"))
