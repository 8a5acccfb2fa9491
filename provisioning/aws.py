"""The connection to AWS: clients that retry, stop when asked to, and errors in the user's terms."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from icom import names
from icom.errors import IcomError, UsageError

PRICING_REGION = "us-east-1"  # the price list has endpoints in few regions; this one has all regions' prices
POLICY = "provisioning/iam_policy.json"

# What EC2 answers for a while about things that exist since seconds.
NOT_YET = (
    "InvalidGroup.NotFound",
    "InvalidKeyPair.NotFound",
    "InvalidPlacementGroup.Unknown",
    "InvalidInstanceID.NotFound",
    "InvalidAMIID.NotFound",
    "InvalidAMIID.Unavailable",
)
VISIBLE_TRIES = 30
VISIBLE_SECONDS = 2.0
FIRST_POLL_SECONDS, POLL_SECONDS = 0.5, 5
"""Between looks at what takes time: often first, then at this pace."""
CONSOLES, CONSOLE_LINES = 2, 10
"""Of how many instances that failed the console is shown, and how much of it."""
LOST: dict[str, tuple[str, ...]] = {
    "running": ("stopping", "shutting-down", "terminated"),
    "stopped": ("shutting-down", "terminated"),
    "terminated": (),
}
"""State that is waited for -> states from which no instance gets there by itself."""

CREDENTIALS_HELP = (
    "Check them with `aws sts get-caller-identity`; get new ones with `aws sso login` or `aws configure`."
)
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired")
REJECTED = ("AuthFailure", "InvalidClientTokenId", "SignatureDoesNotMatch", "UnrecognizedClientException")
FORBIDDEN = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
QUOTA = (
    *("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "SecurityGroupLimitExceeded"),
    "SecurityGroupsPerInterfaceLimitExceeded",
)

T = TypeVar("T")


class NodesFailed(IcomError):
    """Instances that did not come to where they had to be; `ids` are theirs."""

    def __init__(self, message: str, ids: Collection[str]) -> None:
        super().__init__(message)
        self.ids = list(ids)


@dataclass(frozen=True)
class Aws:
    """Clients of one region; all of them retry throttling and transient errors, a limited number of times.

    Each is made when it is first used: most commands need EC2's alone.
    """

    region: str
    session: Any

    @cached_property
    def account(self) -> str:
        """Id of the account that the credentials belong to; asks AWS once."""
        return names.account(self.sts.get_caller_identity()["Account"])

    @cached_property
    def sts(self) -> Any:
        return self.session.client("sts", region_name=self.region, config=_patient())

    @cached_property
    def ec2(self) -> Any:
        return self.session.client("ec2", region_name=self.region, config=_patient())

    @cached_property
    def ssm(self) -> Any:
        return self.session.client("ssm", region_name=self.region, config=_patient())

    @cached_property
    def quotas(self) -> Any:
        return self.session.client("service-quotas", region_name=self.region, config=_patient())

    @cached_property
    def pricing(self) -> Any:
        from botocore.config import Config

        # Prices are worth one attempt: there is a table for when they do not come.
        hasty = Config(retries={"mode": "standard", "max_attempts": 1}, connect_timeout=5, read_timeout=10)
        return self.session.client("pricing", region_name=PRICING_REGION, config=hasty)


def _patient() -> Any:
    from botocore.config import Config

    return Config(retries={"mode": "standard", "max_attempts": 8}, connect_timeout=10, read_timeout=60)


def connect(region: str | None, profile: str | None, check: Callable[[], None] = lambda: None) -> Aws:
    """Prepare the clients; asks AWS nothing.

    Args:
        region: None takes the session's.
        profile: in ~/.aws; None takes the session's.
        check: called before every request; what it raises stops the call.

    Raises:
        UsageError: boto3 is not installed, no region, or an unknown one; no such profile; no credentials.
    """
    try:
        import boto3
    except ModuleNotFoundError:
        raise UsageError("This needs boto3: make setup-master EXTRAS=aws") from None
    from botocore.exceptions import ProfileNotFound

    try:
        session = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION"), profile_name=profile)
    except ProfileNotFound as error:
        raise UsageError(
            f"{error}. Known: {', '.join(boto3.session.Session().available_profiles) or 'none'}."
        ) from None
    name = session.region_name
    if name is None:
        raise UsageError("Which region? Give --region, for instance --region eu-central-1, or set AWS_REGION.")
    partitions = session.get_available_partitions()
    if not any(name in session.get_available_regions("ec2", partition) for partition in partitions):
        regions = [region for partition in partitions for region in session.get_available_regions("ec2", partition)]
        near = difflib.get_close_matches(name, regions, n=1)
        hint = f"Did you mean {near[0]}?" if near else "See `aws ec2 describe-regions`."
        raise UsageError(f"AWS has no region {name}. {hint}")
    if session.get_credentials() is None:
        raise UsageError("No AWS credentials. Run `aws configure` or `aws sso login`, or set AWS_PROFILE.")
    # Both: before-call comes once per call, before-send with each of its attempts.
    for event in ("before-call", "before-send"):
        session.events.register(event, lambda **_: check())
    return Aws(name, session)


def pages(client: Any, operation: str, key: str, **request: Any) -> list[dict[str, Any]]:
    """All items under `key` of an operation that answers in pages."""
    return [item for page in client.get_paginator(operation).paginate(**request) for item in page[key]]


def filters(**values: str | list[str]) -> list[dict[str, Any]]:
    """EC2's form of `name=value(s)`; `tag_` stands for `tag:icom:`, other underscores for hyphens."""
    made = []
    for name, value in values.items():
        ours = f"tag:icom:{name.removeprefix('tag_')}" if name.startswith("tag_") else name.replace("_", "-")
        made.append({"Name": ours, "Values": [value] if isinstance(value, str) else value})
    return made


def error_code(error: Exception) -> str:
    """The code of a botocore ClientError, such as InvalidGroup.NotFound; "" for other errors."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def when_visible(call: Callable[[], T], codes: Collection[str] = NOT_YET) -> T:
    """Make a call about things that were made just now, which EC2 may not know everywhere for some seconds."""
    from botocore.exceptions import ClientError

    for _ in range(VISIBLE_TRIES - 1):
        try:
            return call()
        except ClientError as error:
            if error_code(error) not in codes:
                raise
        time.sleep(VISIBLE_SECONDS)
    return call()


def wait_for(aws: Aws, wanted: str, ids: Collection[str], minutes: float) -> None:
    """Wait until instances are in a state.

    Args:
        aws: the connection.
        wanted: running, stopped or terminated; an instance that EC2 does not list any more counts as terminated.
        ids: of the instances; none is fine.
        minutes: how long at most.

    Raises:
        NodesFailed: the time is over, or one of them cannot get there any more; says which, and EC2's reason.
    """
    deadline, pause = time.monotonic() + minutes * 60, FIRST_POLL_SECONDS
    while late := _not_yet(aws, wanted, ids):
        states = "; ".join(f"{id} is {state}" + (f" ({reason})" if reason else "") for id, state, reason in late)
        failed = [id for id, _, _ in late]
        if any(state in LOST[wanted] for _, state, _ in late):
            raise NodesFailed(f"Not {wanted}: {states}", failed)
        if time.monotonic() >= deadline:
            raise NodesFailed(f"Not {wanted} in {minutes:g} minutes (--wait_minutes): {states}", failed)
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)


def _not_yet(aws: Aws, wanted: str, ids: Collection[str]) -> list[tuple[str, str, str]]:
    """(id, state, EC2's reason) of the instances that are in another state."""
    if not ids:
        return []
    # As a filter: an id that EC2 does not know (yet, or any more) is no error then.
    found = pages(aws.ec2, "describe_instances", "Reservations", Filters=filters(instance_id=list(ids)))
    instances = {instance["InstanceId"]: instance for reservation in found for instance in reservation["Instances"]}
    states = {id: instances[id]["State"]["Name"] if id in instances else "not listed" for id in ids}
    there = (wanted, "not listed") if wanted == "terminated" else (wanted,)
    return [
        (id, state, instances.get(id, {}).get("StateReason", {}).get("Message", ""))
        for id, state in states.items()
        if state not in there
    ]


def add_console(aws: Aws, error: BaseException) -> None:
    """Add the last lines of the consoles to the message of a NodesFailed. Never fails: what cannot be read, lacks."""
    if isinstance(error, NodesFailed):
        for id in error.ids[:CONSOLES]:
            if lines := _console(aws, id):
                error.args = ("\n  ".join([f"{error}\nThe end of the console of {id}:", *lines]),)


def _console(aws: Aws, id: str) -> list[str]:
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    for latest in ({"Latest": True}, {}):  # only some types can tell what is there right now
        try:
            text = str(aws.ec2.get_console_output(InstanceId=id, **latest).get("Output", ""))
        except (BotoCoreError, ClientError, ResponseParserError, ValueError):
            continue
        lines = [line.strip() for line in names.plain(text).splitlines()]  # the node has written it
        if kept := [line for line in lines if line]:
            return kept[-CONSOLE_LINES:]
    return []


@contextmanager
def explained() -> Iterator[None]:
    """Turn botocore's errors into IcomError: what was refused, why, and what to do."""
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    try:
        yield
    except exceptions.ClientError as error:
        raise _explain(error) from error
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
        raise UsageError(f"No complete AWS credentials: {error}. {CREDENTIALS_HELP}") from error
    except (exceptions.TokenRetrievalError, exceptions.SSOError, exceptions.CredentialRetrievalError) as error:
        raise IcomError(f"AWS credentials cannot be renewed: {error}. {CREDENTIALS_HELP}") from error
    except (exceptions.BotoCoreError, ResponseParserError) as error:
        raise IcomError(f"AWS could not be asked: {error}. Check the network and --region.") from error


def _explain(error: Any) -> IcomError:
    code, operation = error_code(error), error.operation_name
    text = error.response["Error"].get("Message", "").strip()
    said = f"{operation}: {code}: {text}"
    if code in EXPIRED:
        return IcomError(f"The AWS credentials have expired ({said}). {CREDENTIALS_HELP}")
    if code in REJECTED:
        return IcomError(f"AWS does not accept these credentials ({said}). {CREDENTIALS_HELP}")
    if code in FORBIDDEN:
        return IcomError(f"These credentials may not do that ({said}). What icom needs stands in {POLICY}.")
    if code in QUOTA:
        return IcomError(f"Over the account's quota ({said}). Ask for more: Service Quotas in the AWS console.")
    return IcomError(f"AWS refused {said}")
