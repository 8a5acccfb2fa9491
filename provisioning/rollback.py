"""One call of `icom provision` or `icom bake`: what its steps share, and its undoing where one fails or is stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.console import Console

from icom.errors import IcomError, Stopped
from icom.signals import StopRequest
from provisioning.aws import Aws, add_console, explained
from provisioning.cluster import Cluster
from provisioning.config import ProvisionConfig, as_options, key_file
from provisioning.ec2 import LostTags
from provisioning.folder import ClusterFolder
from provisioning.launches import Launches, learn_launched
from provisioning.plan import Plan
from provisioning.progress import Progress
from provisioning.ssh import Login
from provisioning.teardown import instances, remove, wait_until_gone

REMOVE_MINUTES = 10
"""How long removing waits for instances to end; a short --wait_minutes must not make it give up."""
REMOVE_PASSES = 2


class CallStop(StopRequest):
    """A signal stops the call at its next request or step, unless it removes things by then."""

    removing = False

    def __init__(self, config: ProvisionConfig) -> None:
        doing = f"ending this step, then removing what this call made, as icom teardown{as_options(config)} would"
        super().__init__(doing, also=[signal.SIGHUP])
        self._cluster = config.cluster

    def check(self) -> None:
        """Raise if the call is to stop.

        Raises:
            Stopped: it is.
        """
        if self.signal_number is not None and not self.removing:
            raise Stopped(f"Stopped making {self._cluster}.", self.signal_number)


@dataclass(frozen=True)
class Call:
    """What all steps of a call need."""

    aws: Aws
    plan: Plan
    cluster: Cluster
    """As it was before."""
    login: Login
    launches: Launches
    progress: Progress


@contextmanager
def rollback(
    aws: Aws,
    plan: Plan,
    cluster: Cluster,
    folder: ClusterFolder,
    stop: CallStop,
    undo: Callable[[], None] = lambda: None,
) -> Iterator[Call]:
    """Inside, things are made; where that fails, or is stopped, they are removed again, unless --keep_on_failure.

    Args:
        aws: the connection.
        plan: what is made.
        cluster: as it was before.
        folder: of the cluster; it goes too if there was nothing before.
        stop: whether a signal came, looked at once more at the end.
        undo: takes back what no tag of this call is on.

    Raises:
        IcomError: the removal failed too; names what is left.
    """
    config = plan.config
    login = Login(folder, config.ssh_user, key_file(config) if config.key_name else folder.key)
    call = Call(aws, plan, cluster, login, Launches(stop.check), Progress(Console(highlight=False)))
    try:
        yield call
        stop.check()
    except BaseException as error:
        stop.removing = True
        add_console(aws, error)
        if config.keep_on_failure:
            _say_if_heard(
                f"Kept what was made of {config.cluster}. The same command again goes on; icom teardown"
                f"{as_options(config)} removes it."
            )
        else:
            _remove(call, error, undo)
            if cluster.empty:
                folder.remove()
        raise


def _remove(call: Call, error: BaseException, undo: Callable[[], None]) -> None:
    """Remove what the call made.

    Raises:
        IcomError: some of it is left; names it.
    """
    aws, plan, name = call.aws, call.plan, call.plan.config.cluster
    _say_if_heard("Removing what this call made …")
    errors: list[str] = []
    left: list[tuple[str, str]] = []
    for _ in range(REMOVE_PASSES):  # a request whose answer was lost may show up late: again, until nothing does
        try:
            with explained():
                unknown = learn_launched(aws, call.launches)
                launched = [*call.launches.ids, *instances(left)]
                errors = unknown + remove(
                    aws, name, REMOVE_MINUTES, _say_if_heard, plan.run, images=True, launched=launched
                )
                undo()
                left = wait_until_gone(aws, name, plan.run, images=True)
        except IcomError as second:
            errors.append(str(second))
        if not left and not errors:
            _say_if_heard("All else of it is removed." if isinstance(error, LostTags) else "Nothing of it is left.")
            if plan.there and plan.config.setup:
                _say_if_heard(
                    f"The {len(plan.there)} nodes that were there may have been told of new ones. The same command "
                    f"with --count {len(plan.there)} takes that back."
                )
            return
    names, where = ", ".join(f"{kind} {id}" for kind, id in left), as_options(plan.config)
    raise IcomError(
        f"{error}\nRemoving what this call made failed too: {'; '.join(errors) or 'it is still there'}\n"
        + (f"Still there: {names}\n" if left else "Some of it may still be there.\n")
        + f"See it: icom status{where}\nRemove it: icom teardown{where}"
    ) from error


def _say_if_heard(text: str) -> None:
    """Print; a terminal that is closed must not keep us from removing things."""
    with suppress(OSError, ValueError):
        print(text, flush=True)
