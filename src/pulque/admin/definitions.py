"""All definitions of a cluster in one file: taken from one, given to another."""

from collections.abc import Mapping

from pulque.admin.cluster import ClusterPolicies, KnownServer, PlacedSubject
from pulque.admin.context import Context
from pulque.admin.group_requests import ask_those_concerned, retry_settings, said_by, settings_row
from pulque.admin.models.cluster import (
    ConfigChange,
    Definitions,
    GroupDefinition,
    ImportDone,
    SubjectDefinition,
)
from pulque.admin.models.subject import ORDER_NAMES, ORDERS
from pulque.client.options.group_options import changed_of, mode_of
from pulque.errors import (
    InvalidRequestError,
    RemoteProtocolError,
    UnavailableError,
    UnknownGroupError,
)
from pulque.model.groups import Mode, tag_filter
from pulque.model.names import Pattern, Subject, is_broadcast, is_pattern
from pulque.model.ordered import OrderStrategy
from pulque.wire.requests import ChangeGroup, Subscribe
from pulque.wire.responses import Response, Subscribed

__all__ = ["changed_policies", "export_definitions", "import_definitions"]

_AT_ONCE = 1000
_CONSUMER = "pulque-import"


async def export_definitions(context: Context) -> Definitions:
    """Return what a new cluster needs to be like this one, but for its messages.

    Raises:
        UnavailableError: A broker does not answer, so that its groups are not known.
    """
    subjects = await _all_subjects(context)
    return Definitions(
        policies=_shown(await context.cluster.policies()),
        subjects=[
            SubjectDefinition(
                subject=each.subject, partitions=each.taking, order=ORDER_NAMES[each.order]
            )
            for each in subjects
        ],
        read_only=list(await context.cluster.read_only_marks()),
        groups=await _all_groups(context),
    )


async def import_definitions(
    context: Context, wanted: Definitions, *, dry_run: bool
) -> ImportDone:
    """Create what is defined and does not exist; nothing that exists is removed.

    Raises:
        PulqueError: A part of it cannot be; what came before it is done.
    """
    existing = {each.subject: each for each in await _all_subjects(context)}
    _check_groups(wanted, existing)
    marks = set(await context.cluster.read_only_marks())
    policies = await context.cluster.policies()
    plan = ImportDone(
        dry_run=dry_run,
        created=[each.subject for each in wanted.subjects if each.subject not in existing],
        extended=[
            each.subject
            for each in wanted.subjects
            if each.partitions is not None
            and (known := existing.get(Subject(each.subject))) is not None
            and known.taking < each.partitions
        ],
        ordered=[
            each.subject
            for each in wanted.subjects
            if _is_new_order(each, existing.get(Subject(each.subject)))
        ],
        marked=[each for each in wanted.read_only if each not in marks],
        groups=len(wanted.groups),
        policies=changed_policies(policies, wanted.policies) != policies,
    )
    if not dry_run:
        await _import(context, wanted, plan, policies)
    return plan


def changed_policies(policies: ClusterPolicies, change: ConfigChange) -> ClusterPolicies:
    """Return what holds after a change."""
    return ClusterPolicies(
        policies.create if change.create is None else change.create,
        policies.allowed if change.allowed is None else tuple(map(Pattern, change.allowed)),
        policies.spread if change.spread is None else change.spread,
    )


def _is_new_order(wanted: SubjectDefinition, known: PlacedSubject | None) -> bool:
    """Return whether a subject is to get another strategy of order than it has, or would have."""
    if wanted.order is None:
        return False
    order = OrderStrategy.BEST_EFFORT if known is None else known.order
    return ORDERS[wanted.order] is not order


def _check_groups(wanted: Definitions, existing: Mapping[Subject, PlacedSubject]) -> None:
    defined = {each.subject for each in wanted.subjects}
    for group in wanted.groups:
        subject = group.subject
        if not is_pattern(subject) and subject not in existing and subject not in defined:
            raise InvalidRequestError(
                f"group {group.group} is of {subject}, which is neither defined nor there"
            )


def _shown(policies: ClusterPolicies) -> ConfigChange:
    return ConfigChange(
        create=policies.create, allowed=list(policies.allowed), spread=policies.spread
    )


async def _import(
    context: Context, wanted: Definitions, plan: ImportDone, policies: ClusterPolicies
) -> None:
    if plan.policies:
        await context.cluster.set_policies(changed_policies(policies, wanted.policies))
    for each in wanted.subjects:
        placed = await context.cluster.create_subject(Subject(each.subject))
        if each.order is not None and _is_new_order(each, placed):
            # First of all: what is split from then on keeps its order, or need not.
            await context.cluster.order_subject(Subject(each.subject), ORDERS[each.order])
        if each.partitions is not None and placed.taking < each.partitions:
            await context.cluster.extend_subject(Subject(each.subject), each.partitions)
    for pattern in plan.marked:
        await context.cluster.mark_subject(Pattern(pattern), is_read_only=True)
    for group in wanted.groups:
        await _import_group(context, group)


async def _import_group(context: Context, wanted: GroupDefinition) -> None:
    """Tell every broker that may have the subject what a group wants."""
    mode = mode_of(wanted.mode, wanted.group, broadcast=None)
    tags = tag_filter(wanted.filter.any_of, wanted.filter.all_of)
    retry = retry_settings(wanted.retry)
    change = ChangeGroup(wanted.group, wanted.subject, True, mode, True, tags, retry)
    subscribe = Subscribe(wanted.group, _CONSUMER, 0, wanted.subject, mode, tags, retry=retry)

    async def tell(server: KnownServer) -> Mode:
        try:
            return (await context.brokers.ask(server, change, changed_of)).mode
        except UnknownGroupError:
            return await context.brokers.ask(server, subscribe, _mode_of)

    holders = await _holders(context, wanted.subject)
    await ask_those_concerned(context.brokers, holders, tell, is_change=True)


async def _holders(context: Context, subject: str) -> list[KnownServer]:
    servers = [server for server in await context.serving() if server.is_alive]
    if is_pattern(subject):
        return servers
    placed = await context.cluster.subject(Subject(subject))
    names = {each.broker_group for each in placed.partitions} if placed else set()
    found = [server for server in servers if server.broker_group in names]
    if not found:
        raise UnavailableError(f"no broker of {subject} answers, so its groups cannot be told")
    return found


async def _all_subjects(context: Context) -> list[PlacedSubject]:
    found: list[PlacedSubject] = []
    while some := await context.cluster.subjects(found[-1].subject if found else "", _AT_ONCE):
        found += some
    return found


async def _all_groups(context: Context) -> list[GroupDefinition]:
    said, silent = await said_by(context)
    if silent:
        names = ", ".join(sorted({each.broker for each in silent}))
        raise UnavailableError(f"no answer of {names}, so its groups are not known")
    shown = {
        (each.group, each.subject): settings_row(each.subject, each.settings, known)
        for each, known in said.items()
        if not is_broadcast(each.group)
    }
    return [
        GroupDefinition(
            group=group,
            subject=subject,
            mode="shared" if row.mode == "broadcast" else row.mode,
            filter=row.filter,
            retry=row.retry,
        )
        for (group, subject), row in shown.items()
    ]


def _mode_of(response: Response) -> Mode:
    if not isinstance(response, Subscribed):
        raise RemoteProtocolError(f"a subscription got {response!r}")
    return response.mode
