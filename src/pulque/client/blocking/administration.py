# Generated from aio/administration.py by `make blocking`: edit that file, not this one.
"""What administrators ask of a broker: groups, status, segments."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pulque.client.blocking.conversation import Asker
from pulque.client.blocking.dead_letters import DeadLetters
from pulque.client.inspecting.broker_answers import Said, of_all, of_one
from pulque.client.inspecting.broker_status import report_of, sealed_end_of
from pulque.client.inspecting.dead_letters import DeadLetterTalks
from pulque.client.inspecting.groups import (
    GroupState,
    PartitionReset,
    groups_of,
    groups_request,
    reset_request,
    resets_of,
)
from pulque.client.options.group_options import (
    ModeName,
    RetryPolicy,
    StartAt,
    change_request,
    changed_of,
    look_request,
)
from pulque.errors import PulqueError, RejectedError
from pulque.model.names import EVERYTHING
from pulque.wire.requests import Request, Seal, Status
from pulque.wire.responses import Response

__all__ = ["AdministrationMethods"]

T = TypeVar("T")


class AdministrationMethods:
    """What a client can do beside sending and receiving."""

    _timeout: float

    def _ask(self, request: Request, timeout: float, convert: Callable[[Response], T]) -> T:
        raise NotImplementedError

    def _askers(self, subject: str) -> Mapping[str, Asker]:
        """Return whom to ask about a subject or a pattern, by broker group."""
        raise NotImplementedError

    def _ask_all(
        self, subject: str, request: Request, convert: Callable[[Response], T]
    ) -> list[tuple[str, T]]:
        """Ask all brokers that serve a subject or a pattern."""
        return self._ask_each(self._askers(subject), request, convert)

    @staticmethod
    def _ask_each(
        askers: Mapping[str, Asker], request: Request, convert: Callable[[Response], T]
    ) -> list[tuple[str, T]]:
        said: list[Said[T]] = []
        for broker, ask in askers.items():
            try:
                said.append((broker, convert(ask(request))))
            except RejectedError as error:
                said.append((broker, error))
        return of_all(said)

    def reset(
        self,
        subject: str,
        group: str,
        to: StartAt,
        *,
        partition: str | None = None,
        broker: str | None = None,
        dry_run: bool = False,
    ) -> list[PartitionReset]:
        """Have a group go on from another place; return what that means for each partition.

        It is on disk when this returns, and consumers notice at once: what they hold is
        abandoned, and is not retried. What waits for a retry still comes.

        Args:
            subject: A subject, or a pattern such as ``order.*``.
            group: The group; of a broadcast consumer, ``#`` and its id.
            to: ``"earliest"``, ``"latest"``, a ``datetime`` with a time zone (the first message
                stored at or after it, to the millisecond), or a sequence.
            partition: Only this partition.
            broker: Only this broker group's; needed for a sequence, if several have the subject.
            dry_run: Only say what would happen.

        Raises:
            UnknownGroupError: The group never consumed the subject here.
            UnknownSubjectError: There is no such subject or partition here.
            UsageError: The broker is not there, or it is not said of which one a sequence is.
        """
        request = reset_request(subject, group, to, partition, dry_run=dry_run)
        askers = self._askers(subject)
        if broker is not None or isinstance(to, int):
            chosen = of_one(askers, broker, f"a reset of {group}")
            askers = {chosen: askers[chosen]}
        if len(askers) > 1 and not dry_run:
            # Nothing is done if one of them would refuse.
            look = reset_request(subject, group, to, partition, dry_run=True)
            willing = self._ask_each(askers, look, resets_of)
            askers = {name: askers[name] for name, _ in willing}
        found = self._ask_each(askers, request, resets_of)
        return [row._replace(broker_group=broker) for broker, rows in found for row in rows]

    def groups(self, subject: str | None = None, *, group: str | None = None) -> list[GroupState]:
        """Return where groups are, in each partition that they ever pulled from.

        Args:
            subject: Only those of this subject, or of a pattern such as ``order.*``.
            group: Only this group.
        """
        request = groups_request(subject, group)
        found = self._ask_all(subject or EVERYTHING, request, groups_of)
        return [row._replace(broker_group=broker) for broker, rows in found for row in rows]

    def dead(self, subject: str, group: str) -> DeadLetters:
        """Return the dead letters of a group: list, show, resend and purge them.

        Where several brokers have some, each counts its own: ``show`` and ``resend`` want to know
        whose are meant, the letter's ``broker_group``.
        """
        return DeadLetters(
            DeadLetterTalks(subject, group), functools.partial(self._askers, subject)
        )

    def change_group(
        self,
        subject: str,
        group: str,
        *,
        mode: ModeName | None = None,
        tags: Iterable[str] | None = None,
        all_tags: Iterable[str] | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Change what a group said about a subject, for all its consumers.

        A new filter counts for messages that nobody was handed yet. Consumers that run are
        refused from then on, until they are started with the group's mode and filter of now.

        Args:
            subject: The subject or the pattern that the group subscribed to.
            group: The group.
            mode: ``"shared"`` or ``"once"``; its consumers must hold nothing.
            tags: The filter from now on: any of these; empty for none …
            all_tags: … and all of these.
            retry: How failed messages come again; what it does not say stays as it is.

        Raises:
            UnknownGroupError: The group never subscribed to it.
            NotAllowedError: A consumer holds messages, so that the mode cannot be switched.
        """
        request = change_request(
            subject, group, mode=mode, tags=tags, all_tags=all_tags, retry=retry
        )
        askers = self._askers(subject)
        if len(askers) > 1:
            # Nothing is done if one of them does not answer.
            willing = self._ask_each(askers, look_request(subject, group), changed_of)
            askers = {name: askers[name] for name, _ in willing}
        self._ask_each(askers, request, changed_of)

    def status(self) -> dict[str, Any]:
        """Return how the server of the URL is doing; fields are added without notice."""
        return self._ask(Status(), self._timeout, report_of)

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Return how each broker of a cluster is doing, by broker group.

        One that does not answer has nothing but an ``error``. A lone broker's name is empty.
        """
        found: dict[str, dict[str, Any]] = {}
        for broker, ask in self._askers(EVERYTHING).items():
            try:
                found[broker] = report_of(ask(Status()))
            except PulqueError as error:
                found[broker] = {"error": str(error)}
        return found

    def seal(self) -> dict[str, int]:
        """Close the open segment of every broker, so that it can be archived.

        Returns:
            Where the next segment of each begins, by broker group. A lone broker's name is empty.
        """
        return dict(self._ask_all(EVERYTHING, Seal(), sealed_end_of))
