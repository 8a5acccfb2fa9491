"""Ears and hands between icom and AWS, by botocore's events: what was called, and faults at will."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.command import Result

Icom = Callable[..., Result]
REMEMBERED: dict[Any, Any] = {}


def remembered(what: Any, make: Callable[[], Any]) -> Any:
    """What `make` returned the first time."""
    if what not in REMEMBERED:
        REMEMBERED[what] = make()
    return REMEMBERED[what]


@dataclass
class Wire:
    """Every call to AWS of this process: `calls` in order, and one fault to inject."""

    calls: list[str] = field(default_factory=list)
    """service:Operation."""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(Operation, its parameters) of each."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """service:Operation -> what to answer in AWS's place, where moto cannot; has to have the form that AWS gives it."""
    changes: dict[str, Callable[[dict[str, Any]], None]] = field(default_factory=dict)
    """service:Operation -> what to do to AWS's answers, in place."""
    untagged: set[str] = field(default_factory=set)
    """Operations whose TagSpecifications AWS loses."""
    at: int | None = None
    """Which call (from 0) meets the fault; None: none does."""
    fault: str = ""
    """A key of FAULTS, or `code:CODE` for EC2's answer with that error code."""
    times: int = 1000
    """How many attempts of that call meet it."""
    only: str = ""
    """Every call of this operation meets the fault instead, `times` times in all."""
    skip: int = 0
    """How many attempts pass before that."""

    def hit(self) -> bool:
        """Whether the current attempt is to fail."""
        here = self.calls[-1] == self.only if self.only else len(self.calls) - 1 == self.at
        if here and self.skip > 0:
            self.skip -= 1
        elif here and self.times > 0:
            self.times -= 1
            return True
        return False

    def parameters(self, model: Any, params: dict[str, Any], **_: Any) -> dict[str, Any] | None:
        self.requests.append((model.name, params))
        if model.name in self.untagged and "DryRun" not in params:
            return {name: value for name, value in params.items() if name != "TagSpecifications"}
        return None

    def after_call(self, model: Any, parsed: dict[str, Any], **_: Any) -> None:
        if "Error" not in parsed:
            self.changes.get(f"{model.service_model.endpoint_prefix}:{model.name}", lambda answer: None)(parsed)

    def before_call(self, model: Any, **_: Any) -> Any:
        from botocore.awsrequest import AWSResponse
        from botocore.validate import validate_parameters

        self.calls.append(f"{model.service_model.endpoint_prefix}:{model.name}")
        if answer := self.answers.get(self.calls[-1]):
            validate_parameters(answer, model.output_shape)
            return AWSResponse("", 200, {}, None), answer
        if self.fault == "ctrl-c" and self.hit():
            os.kill(os.getpid(), signal.SIGINT)
        code = {"refused": "UnauthorizedOperation"}.get(self.fault) or self.fault.partition("code:")[2]
        if code and self.hit():
            return AWSResponse("", 403, {}, None), {"Error": {"Code": code, "Message": f"injected {code}"}}
        return None

    def before_send(self, request: Any, **_: Any) -> Any:
        from botocore.awsrequest import AWSResponse
        from botocore.exceptions import ReadTimeoutError
        from botocore.httpsession import URLLib3Session

        if self.fault == "throttled" and self.hit():
            xml = "<Response><Errors><Error><Code>RequestLimitExceeded</Code></Error></Errors></Response>"
            body = xml if self.calls[-1].startswith(("ec2:", "sts:")) else '{"__type": "ThrottlingException"}'
            return AWSResponse(request.url, 503, {}, _Body(body.encode()))
        if self.fault == "timeout" and self.hit():
            URLLib3Session().send(request)  # AWS does it; its answer is lost
            raise ReadTimeoutError(endpoint_url=request.url)
        return None


class _Body(io.BytesIO):
    def stream(self) -> Iterator[bytes]:
        yield self.read()


def read_descriptions_once(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let botocore read AWS's service descriptions, and make methods of them, once for all clients of all tests.

    Returns:
        What reads them, for a session's data_loader.
    """
    import botocore.loaders
    from botocore.client import ClientCreator

    class Creator(ClientCreator):
        def _load_service_model(self, service_name: str, api_version: str | None = None) -> Any:
            model = super()._load_service_model
            return remembered(("model", service_name), lambda: model(service_name, api_version))

        def _create_methods(self, service_model: Any) -> Any:
            methods = super()._create_methods
            return dict(remembered(("methods", service_model.service_name), lambda: methods(service_model)))

    monkeypatch.setattr("botocore.client.ClientCreator", Creator)
    return remembered("loader", botocore.loaders.create_loader)
