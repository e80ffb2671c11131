"""What is done to the cluster by command. Every method is safe at any meta server at any time."""

from collections.abc import Sequence

from pulque.errors import InvalidRequestError, NotAllowedError, UnknownSubjectError
from pulque.meta.components import MetaParts
from pulque.meta.directory_refresh import Refresher
from pulque.meta.subject_creation import Subjects
from pulque.model.cluster import GroupMarks, Placement, Server
from pulque.model.names import Subject, parse_pattern, parse_subject
from pulque.model.ordered import OrderStrategy
from pulque.rules.membership import usable_groups
from pulque.rules.ranges import check_count, merge, open_places, split
from pulque.rules.routing import place_on

__all__ = ["ClusterCommands"]

_TRIES = 5
_NO_MARKS = GroupMarks()


class ClusterCommands:
    """Commands about subjects, broker groups and servers.

    All of them raise ``UnavailableError`` while the database is away.
    """

    def __init__(self, parts: MetaParts, refresher: Refresher, subjects: Subjects) -> None:
        self._parts = parts
        self._directory = parts.directory
        self._store = parts.store
        self._refresher = refresher
        self._subjects = subjects

    async def create_subject(
        self, name: str, broker_groups: Sequence[str] = ()
    ) -> tuple[Placement, ...]:
        """Create a subject, on chosen broker groups if any are named; return its partitions.

        Args:
            name: What it is called.
            broker_groups: One for each partition; a group that is named twice gets two. If there
                are none, it is placed like at a first send.

        Raises:
            InvalidNameError: That is no name of a subject.
            InvalidRequestError: A broker group is not known.
            NotAllowedError: The subject exists, or may not.
        """
        subject = parse_subject(name)
        await self._refresher.refresh()
        if subject in self._directory.subjects:
            raise NotAllowedError(f"subject {subject} exists; extend it to give it partitions")
        self._subjects.check(subject)
        self._check_groups(broker_groups)
        if broker_groups:
            placed = place_on(subject, broker_groups)
        else:
            placed = self._directory.place_all(
                [subject], spread=self._subjects.policies.now.spread
            )[subject]
        await self._store.create_subjects({subject: placed})
        await self._refresher.refresh()
        return self._directory.subjects[subject]

    async def extend_subject(
        self, name: str, count: int, broker_groups: Sequence[str] = ()
    ) -> tuple[Placement, ...]:
        """Split partitions of a subject, so that more take messages; return all that it has then.

        Those that are split are closed. The first part of each stays on its broker group.

        Args:
            name: Which one.
            count: How many partitions are to take messages.
            broker_groups: Where the others go; if there are none, they stay on the broker groups
                that the subject is on, those with the fewest of its partitions first.

        Raises:
            UnknownSubjectError: It does not exist.
            InvalidRequestError: It would not have more, or would have too many.
        """
        subject = parse_subject(name)
        for _ in range(_TRIES):
            placed = await self._placed(subject)
            groups = self._groups_for(subject, placed, count, broker_groups)
            if await self._store.replace_partitions(
                subject, placed, split(subject, placed, count, groups)
            ):
                await self._refresher.refresh()
                break
        return self._directory.subjects[subject]

    async def merge_subject(self, name: str, count: int) -> tuple[Placement, ...]:
        """Merge partitions of a subject, so that fewer take messages; return all that it has then.

        Those that are merged are closed, and stay until their messages are too old.

        Args:
            name: Which one.
            count: How many partitions are to take messages.

        Raises:
            UnknownSubjectError: It does not exist.
            InvalidRequestError: It would not have fewer, or none.
        """
        subject = parse_subject(name)
        for _ in range(_TRIES):
            placed = await self._placed(subject)
            wanted = merge(subject, placed, count)
            if await self._store.replace_partitions(subject, placed, wanted):
                await self._refresher.refresh()
                break
        return self._directory.subjects[subject]

    async def order_subject(self, name: str, order: OrderStrategy) -> None:
        """Decide what a failure may do to the order of a subject's messages.

        Raises:
            UnknownSubjectError: It does not exist.
        """
        subject = parse_subject(name)
        await self._placed(subject)
        await self._store.set_order(subject, order)
        await self._refresher.refresh()

    async def _placed(self, subject: Subject) -> tuple[Placement, ...]:
        await self._refresher.refresh()
        placed = self._directory.subjects.get(subject)
        if placed is None:
            raise UnknownSubjectError(f"subject {subject} does not exist")
        return placed

    async def mark_group(
        self,
        broker_group: str,
        *,
        is_read_only: bool | None = None,
        is_draining: bool | None = None,
    ) -> GroupMarks:
        """Have a broker group take no sends, or take them again; what is None stays as it is.

        Raises:
            InvalidRequestError: The broker group is not known.
        """
        await self._refresher.refresh()
        self._check_groups([broker_group])
        marks = self._directory.marks.get(broker_group, _NO_MARKS)
        if is_read_only is not None:
            marks = marks._replace(is_read_only=is_read_only)
        if is_draining is not None:
            marks = marks._replace(is_draining=is_draining)
        await self._store.mark_group(broker_group, marks)
        await self._refresher.refresh()
        return marks

    async def mark_subject(self, pattern: str, *, is_read_only: bool) -> None:
        """Have a subject, or all of a pattern, take no sends, or take them again.

        Raises:
            InvalidNameError: That is no subject or pattern.
        """
        await self._store.mark_subject(parse_pattern(pattern), is_read_only=is_read_only)
        await self._refresher.refresh()

    async def remove_server(self, name: str) -> None:
        """Forget a server that is gone for good.

        Raises:
            InvalidRequestError: There is none of this name.
            NotAllowedError: It lives.
        """
        known = await self._server(name)
        if self._directory.is_living(known):
            raise NotAllowedError(f"{name} at {known.address} lives: drain and stop it first")
        await self._store.register(known._replace(is_removed=True), known)
        await self._refresher.refresh()

    async def _server(self, name: str) -> Server:
        await self._refresher.refresh()
        known = self._directory.servers.get(name)
        if known is None or known.is_removed:
            names = [each.name for each in self._directory.servers.values() if not each.is_removed]
            raise InvalidRequestError(f"there is no server {name!r}; there are {sorted(names)}")
        return known

    def _groups_for(
        self,
        subject: Subject,
        placed: Sequence[Placement],
        count: int,
        broker_groups: Sequence[str],
    ) -> Sequence[str]:
        """Return the broker group of each partition that is to be added."""
        check_count(subject, count)
        taking = open_places(placed)
        missing = count - len(taking)
        if missing < 1:
            raise InvalidRequestError(
                f"subject {subject} has {len(taking)} partitions that take messages, and {count} "
                "are wanted: there can only be more; merge them to have fewer"
            )
        if broker_groups:
            self._check_groups(broker_groups)
            if len(broker_groups) != missing:
                raise InvalidRequestError(
                    f"{missing} partitions are to be added, and {len(broker_groups)} broker "
                    "groups are named"
                )
            return broker_groups
        return self._spread_over(subject, [placed[at] for at in taking], missing)

    def _spread_over(
        self, subject: Subject, placed: Sequence[Placement], missing: int
    ) -> Sequence[str]:
        own = [each.broker_group for each in placed]
        # Nobody chose the others: the subject may have been placed to stay away from them.
        usable = [each for each in usable_groups(self._directory.brokers) if each in own]
        if not usable:
            raise NotAllowedError(
                f"{subject} is on {', '.join(dict.fromkeys(own))}, which take no messages now, so "
                "it stays as it is; name broker groups to have it on others"
            )
        chosen: list[str] = []
        for _ in range(missing):
            here = own + chosen
            chosen.append(min(usable, key=lambda group: (here.count(group), own.index(group))))
        return chosen

    def _check_groups(self, broker_groups: Sequence[str]) -> None:
        known = self._directory.broker_groups()
        for group in broker_groups:
            if group not in known:
                raise InvalidRequestError(
                    f"there is no broker group {group!r}; there are {', '.join(sorted(known))}"
                )
