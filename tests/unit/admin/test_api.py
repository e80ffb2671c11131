"""The API: what it shows, what it changes, page by page, over all brokers."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import pulque
from pulque.admin.cluster import WatchingClient
from pulque.errors import NotLeaderError
from pulque.wire.leadership import HandOver
from pulque.wire.requests import Request
from tests.unit.admin.conftest import NAMES, Api
from tests.unit.admin.fakes import FakeLeader, led_group, server
from tests.unit.client.fake_broker import Drop


def consume(
    api: Api, broker: str, subject: str, group: str, *, acked: int, **wishes: object
) -> None:
    """Have a group pull everything of a broker, and settle some of it."""
    with api.client(broker) as client, client.consumer(subject, group, **wishes) as consumer:  # type: ignore[arg-type]
        for number, message in enumerate(consumer.pull(timeout=5.0 if acked else 0.1)):
            if number < acked:
                message.ack()


def send(api: Api, broker: str, subject: str, count: int) -> None:
    with api.client(broker) as client:
        client.send_many(subject, [b"%d" % number for number in range(count)])


# ── subjects ───────────────────────────────────────────────────────────────────────────────────


async def test_a_subject_is_created_once_shown_extended_and_marked(api: Api) -> None:
    made = await api.ask("POST", "/subjects", {"subject": "orders"}, status=201)
    again = await api.ask("POST", "/subjects", {"subject": "orders"})

    assert made == again == await api.get("/subjects/orders")
    assert [(p["broker_group"], p["slots"]) for p in made["partitions"]] == [
        ("b1", [0, 512]),
        ("b2", [512, 1024]),
    ]
    extended = await api.ask("POST", "/subjects/orders/extend", {"partitions": 4})
    assert [p["partition"] for p in extended["partitions"]] == [
        "orders", "orders", "orders#2", "orders#3",
    ]  # fmt: skip
    refused = await api.ask("POST", "/subjects/orders/extend", {"partitions": 1}, status=409)
    assert refused["error"] == "NotAllowedError"
    assert not refused["retry"]
    marks = await api.ask("PUT", "/subjects/orders/read-only", {"read_only": True})
    assert marks == {"read_only": ["orders"]}
    assert (await api.get("/subjects/orders"))["read_only"]
    assert await api.ask("PUT", "/subjects/a.*/read-only", {"read_only": True}) == {
        "read_only": ["a.*", "orders"]
    }
    await api.ask("PUT", "/subjects/orders/read-only", {"read_only": False})
    assert await api.get("/read-only") == {"read_only": ["a.*"]}


async def test_a_subject_is_created_where_one_says(api: Api) -> None:
    wanted = {"subject": "here", "broker_groups": ["b2", "b2"]}
    made = await api.ask("POST", "/subjects", wanted, status=201)

    assert [each["broker_group"] for each in made["partitions"]] == ["b2", "b2"]
    nowhere = {"subject": "there", "broker_groups": ["b9"]}
    await api.ask("POST", "/subjects", nowhere, status=422)


async def test_what_is_not_there_is_not_found(api: Api) -> None:
    for path in (
        "/subjects/nothing",
        "/subjects/nothing/partitions",
        "/groups/nobody",
        "/groups/nobody/lag",
        "/brokers/nowhere",
        "/dead/nothing/nobody/b1/7",
        "/dead/nothing/nobody/b9/7",
    ):
        found = await api.get(path, status=404)
        assert set(found) == {"code", "error", "message", "retry"}
    await api.ask("POST", "/subjects/nothing/extend", {"partitions": 4}, status=404)
    await api.ask("DELETE", "/brokers/nowhere", status=404)
    assert (await api.http.get("/api/v1/nowhere")).status_code == 404


async def test_every_list_is_paged_without_gaps_or_repeats(api: Api) -> None:
    for number in range(7):
        await api.ask("POST", "/subjects", {"subject": f"s{number}"}, status=201)
    for number in range(3):
        api.cluster.known[f"x{number}"] = server(f"x{number}", state="silent")

    pages = await api.all_pages("/subjects", limit=3)
    assert [[row["subject"] for row in page] for page in pages] == [
        ["s0", "s1", "s2"], ["s3", "s4", "s5"], ["s6"],
    ]  # fmt: skip
    rows = [
        (r["subject"], r["broker_group"])
        for p in await api.all_pages("/partitions", limit=3)
        for r in p
    ]
    assert rows == [(f"s{number}", name) for number in range(7) for name in NAMES]
    names = [row["name"] for page in await api.all_pages("/brokers", limit=2) for row in page]
    assert names == ["b1", "b2", "x0", "x1", "x2"]


@pytest.mark.parametrize(
    "cursor", ["", "x", "WzFd", "WyJhIiwgImIiXQ", "é", "a" * 3000, "W1tbXV1d"]
)
async def test_a_cursor_that_no_page_gave_is_refused(api: Api, cursor: str) -> None:
    found = await api.get("/subjects", status=422, cursor=cursor)
    assert "cursor" in found["message"]


async def test_partitions_are_shown_as_brokers_have_them(api: Api) -> None:
    send(api, "b1", "shown", 5)
    send(api, "b2", "shown", 2)
    with api.client("b2") as client:
        client.send("shown", b"urgent", priority=9)

    found = await api.get("/subjects/shown/partitions")

    assert [(r["broker_group"], r["partition"], r["start"], r["end"]) for r in found["items"]] == [
        ("b1", "shown", 0, 5),
        ("b2", "shown", 0, 2),
        ("b2", "shown#p9", 0, 1),
    ]
    pages = await api.all_pages("/subjects/shown/partitions", limit=1)
    assert [row for page in pages for row in page] == found["items"]


# ── groups ─────────────────────────────────────────────────────────────────────────────────────


async def test_lag_is_told_for_each_broker_with_the_age_of_what_waits(api: Api) -> None:
    send(api, "b1", "lag.a", 10)
    consume(api, "b1", "lag.a", "slow", acked=10)
    send(api, "b1", "lag.a", 3)
    send(api, "b2", "lag.a", 6)
    consume(api, "b2", "lag.a", "slow", acked=6)

    (row,) = (await api.get("/groups", subject="lag.*"))["items"]
    lags = (await api.get("/groups/slow/lag"))["items"]

    assert (row["group"], row["mode"], row["partitions"], row["lag"]) == ("slow", "shared", 2, 3)
    by_broker = {each["broker_group"]: each for each in lags}
    assert (by_broker["b1"]["lag"], by_broker["b1"]["next_sequence"]) == (3, 10)
    assert by_broker["b1"]["oldest_age_seconds"] >= 0
    assert (by_broker["b2"]["lag"], by_broker["b2"]["oldest_age_seconds"]) == (0, None)
    pages = await api.all_pages("/groups/slow/lag", limit=1)
    assert [[row["broker_group"] for row in page] for page in pages] == [["b1"], ["b2"]]


async def test_a_group_is_shown_with_what_it_said_and_changed_on_all_brokers(api: Api) -> None:
    for name in NAMES:
        send(api, name, "said.a", 1)
        retry = pulque.RetryPolicy(delays=[1, 2.5], max_attempts=7)
        consume(api, name, "said.*", "talker", acked=0, tags=["x", "y"], retry=retry)

    (said,) = (await api.get("/groups/talker"))["settings"]

    assert said == {
        "subject": "said.*",
        "mode": "shared",
        "filter": {"any_of": ["x", "y"], "all_of": []},
        "retry": {"delays_seconds": [1.0, 2.5], "jitter": None, "max_attempts": 7},
        "broker_groups": ["b1", "b2"],
    }
    change = {"subject": "said.*", "filter": {"all_of": ["z"]}, "mode": "once"}
    changed = await api.ask("PATCH", "/groups/talker", change)
    assert (changed["mode"], changed["filter"]) == ("once", {"any_of": [], "all_of": ["z"]})
    assert (await api.get("/groups/talker"))["settings"] == [changed]
    await api.ask("PATCH", "/groups/talker", {"subject": "said.*"}, status=422)
    await api.ask("PATCH", "/groups/talker", {"subject": "other", "mode": "once"}, status=404)


async def test_a_reset_is_tried_dry_first_and_done_on_all_brokers(api: Api) -> None:
    for name in NAMES:
        send(api, name, "again", 5)
        consume(api, name, "again", "twice", acked=5)
    path, wanted = "/groups/twice/reset", {"subject": "again", "to": {"at": "earliest"}}

    dry = await api.ask("POST", path, wanted)
    assert dry["dry_run"]
    assert [(r["broker_group"], r["position"], r["target"], r["reread"]) for r in dry["rows"]] == [
        ("b1", 5, 0, 5),
        ("b2", 5, 0, 5),
    ]
    assert (await api.get("/groups", subject="again"))["items"][0]["lag"] == 0
    done = await api.ask("POST", path, {**wanted, "dry_run": False})
    assert not done["dry_run"]
    assert done["rows"] == dry["rows"]
    assert (await api.get("/groups", subject="again"))["items"][0]["lag"] == 10

    one = {"subject": "again", "to": {"sequence": 3}, "dry_run": False}
    asked = await api.ask("POST", path, one, status=422)
    assert "which broker group" in asked["message"]
    await api.ask("POST", path, {**one, "broker_group": "b2"})
    assert (await api.get("/groups", subject="again"))["items"][0]["lag"] == 5 + 2
    at = datetime(2100, 1, 1, tzinfo=UTC).isoformat()
    late = await api.ask("POST", path, {"subject": "again", "to": {"time": at}})
    assert [row["target"] for row in late["rows"]] == [5, 5]


async def test_nothing_is_reset_while_a_broker_does_not_answer(api: Api) -> None:
    send(api, "b1", "kept", 5)
    consume(api, "b1", "kept", "careful", acked=5)
    api.cluster.known["b3"] = server("b3")  # where nobody listens
    wanted = {"subject": "kept", "to": {"at": "earliest"}, "dry_run": False}

    refused = await api.ask("POST", "/groups/careful/reset", wanted, status=503)

    assert refused["retry"]
    assert "b3" in refused["message"]
    found = await api.get("/groups", subject="kept")
    assert found["items"][0]["lag"] == 0
    assert [each["broker"] for each in found["unreachable"]] == ["b3"]
    await api.ask("POST", "/groups/careful/reset", {**wanted, "broker_group": "b1"})
    assert (await api.get("/groups", subject="kept"))["items"][0]["lag"] == 5


# ── brokers and clients ────────────────────────────────────────────────────────────────────────


async def test_a_broker_is_shown_marked_drained_and_removed_once_it_is_stopped(api: Api) -> None:
    shown = await api.get("/brokers/b1")
    assert (shown["state"], shown["read_only"], shown["draining"]) == ("ready", False, False)
    assert shown["status"]["pid"] > 0

    assert (await api.ask("PUT", "/brokers/b1/read-only", {"read_only": True}))["read_only"]
    drained = await api.ask("PUT", "/brokers/b1/drain", {"draining": True})
    assert (drained["read_only"], drained["draining"]) == (True, True)
    refused = await api.ask("DELETE", "/brokers/b1", status=409)
    assert "stop it" in refused["message"]
    api.cluster.known["b1"] = api.cluster.known["b1"]._replace(state="silent")
    await api.ask("DELETE", "/brokers/b1", status=204)
    assert [row["name"] for row in (await api.get("/brokers"))["items"]] == ["b2"]


@pytest.fixture
def leader(api: Api) -> Iterator[FakeLeader]:
    with FakeLeader(api.cluster) as leader:
        api.cluster.known |= led_group(leader.url)
        yield leader


async def test_a_group_that_is_led_is_shown_and_handed_over(api: Api, leader: FakeLeader) -> None:
    rows = {row["name"]: row for row in (await api.get("/brokers"))["items"]}
    assert [(rows[name]["standing"], rows[name]["epoch"]) for name in ("l", "f", "b1")] == [
        ("leader", 3),
        ("follower", 3),
        ("alone", 0),
    ]
    assert [rows[name]["in_sync"] for name in ("f", "late", "b1")] == [True, False, None]

    assert await api.ask("POST", "/brokers/l/lead", {}) == rows["l"]
    assert leader.handed_to == []  # it leads already: nobody is asked

    handed = await api.ask("POST", "/brokers/f/lead", {})

    assert (handed["name"], handed["standing"], handed["epoch"]) == ("f", "leader", 4)
    assert leader.handed_to == ["directory-of-f"]
    assert (await api.get("/brokers/l"))["standing"] == "follower"


async def test_nobody_is_asked_to_hand_over_to_who_cannot_lead(
    api: Api, leader: FakeLeader
) -> None:
    refused = await api.ask("POST", "/brokers/late/lead", {}, status=409)
    assert "late does not have all that was confirmed in broker group g" in refused["message"]
    refused = await api.ask("POST", "/brokers/b1/lead", {}, status=422)
    assert "broker group b1 has no followers" in refused["message"]
    await api.ask("POST", "/brokers/nobody/lead", {}, status=404)
    api.cluster.known["f"] = api.cluster.known["f"]._replace(state="silent")
    refused = await api.ask("POST", "/brokers/f/lead", {}, status=409)
    assert "f was not heard of lately" in refused["message"]
    api.cluster.is_away = True
    await api.ask("POST", "/brokers/f/lead", {}, status=503)

    assert leader.handed_to == []


async def test_what_the_leader_says_against_handing_over_is_told(
    api: Api, leader: FakeLeader
) -> None:
    def refuse(request: Request) -> None:
        if isinstance(request, HandOver):
            raise pulque.UnavailableError("no follower has caught up within 3 s")

    leader.fault = refuse

    refused = await api.ask("POST", "/brokers/f/lead", {}, status=503)

    assert refused["message"] == "no follower has caught up within 3 s"
    assert (await api.get("/brokers/l"))["standing"] == "leader"


async def test_a_leader_that_handed_over_and_could_not_say_so_has_done_it(
    api: Api, leader: FakeLeader
) -> None:
    def drop(request: Request) -> None:
        if isinstance(request, HandOver):
            leader.fault = not_leader
            raise Drop(handled=True)

    def not_leader(request: Request) -> None:
        if isinstance(request, HandOver):
            raise NotLeaderError("this broker follows f")

    leader.fault = drop

    handed = await api.ask("POST", "/brokers/f/lead", {})

    assert (handed["standing"], handed["epoch"]) == ("leader", 4)


async def test_who_is_elected_while_a_broker_is_to_lead_is_not_passed_over(
    api: Api, leader: FakeLeader
) -> None:
    def elect_another(request: Request) -> None:
        if isinstance(request, HandOver):
            api.cluster.elect("directory-of-late")
            raise NotLeaderError("this broker follows late")

    leader.fault = elect_another

    refused = await api.ask("POST", "/brokers/f/lead", {}, status=409)

    assert "changed at the same time" in refused["message"]


@pytest.mark.parametrize("away", ["silent", "refuses", "unsure", "lost"])
async def test_a_leader_that_is_away_is_told_to_be_replaced_by_itself(
    api: Api, leader: FakeLeader, away: str
) -> None:
    def unsure(request: Request) -> None:
        if isinstance(request, HandOver):
            raise NotLeaderError("this broker cannot tell whether it still leads its group")

    known = api.cluster.known
    if away == "silent":
        known["l"] = known["l"]._replace(state="silent")
    elif away == "refuses":
        leader.close()
    elif away == "unsure":
        leader.fault = unsure
    else:
        del known["l"]

    refused = await api.ask("POST", "/brokers/f/lead", {}, status=503)

    assert "that leads broker group g cannot be reached" in refused["message"]
    assert "another one is elected by itself after the lease" in refused["message"]
    assert refused["retry"]


async def test_followers_are_not_asked_for_what_their_leader_has(api: Api) -> None:
    send(api, "b1", "led", 2)
    led: dict[str, Any] = {"broker_group": "b1", "epoch": 1, "is_in_sync": True}
    api.cluster.known["b1"] = api.cluster.known["b1"]._replace(standing="leader", **led)
    api.cluster.known["f"] = server("f", standing="follower", state="following", **led)

    found = await api.get("/messages", subject="led")

    assert found["unreachable"] == []
    assert len(found["items"]) == 2


async def test_clients_of_meta_and_brokers_are_listed_page_by_page(api: Api) -> None:
    api.cluster.watching = [
        WatchingClient(f"c{number}", "shop", "127.0.0.1:9", 1_700_000_000_000, 20, 3)
        for number in range(3)
    ]

    pages = await api.all_pages("/clients", limit=2)

    rows = [row for page in pages for row in page]
    assert [row["client"] for row in rows if row["server"] == "meta"] == ["c0", "c1", "c2"]
    assert (rows[0]["application"], rows[0]["routes"], rows[0]["silent_seconds"]) == (
        "shop",
        3,
        0.02,
    )
    assert rows[0]["since"] == "2023-11-14T22:13:20Z"


# ── dead letters ───────────────────────────────────────────────────────────────────────────────


async def test_dead_letters_of_all_brokers_are_listed_shown_resent_and_purged(api: Api) -> None:
    for name in NAMES:
        send(api, name, "fails", 3)
        with api.client(name) as client, client.consumer("fails", "g") as consumer:
            for message in consumer.pull(timeout=5.0):
                message.reject("bad \x1b[31m")

    assert (await api.get("/dead", subject="fails"))["items"] == [
        {"subject": "fails", "group": "g", "count": 6}
    ]
    pages = await api.all_pages("/dead/fails/g", limit=2)
    letters = [row for page in pages for row in page]
    assert [(row["broker_group"], row["sequence"]) for row in letters] == [
        (name, number) for name in NAMES for number in range(3)
    ]
    assert letters[0]["body"] is None
    shown = await api.get("/dead/fails/g/b2/1")
    assert (shown["body"], shown["size"], shown["reason"]) == ("1", 1, "bad \x1b[31m")

    some = [{"broker_group": "b1", "sequence": 0}, {"broker_group": "b2", "sequence": 99}]
    done = await api.ask("POST", "/dead/fails/g/resend", {"letters": some})
    assert (done["resent"], done["missing"]) == (1, some[1:])
    again = await api.ask("POST", "/dead/fails/g/resend", {"letters": some[:1]})
    assert (again["resent"], again["done"]) == (0, some[:1])
    until = {"until": {"broker_group": "b1", "sequence": 1}}
    assert await api.ask("POST", "/dead/fails/g/purge", until) == {"purged": 1}
    assert await api.ask("POST", "/dead/fails/g/resend", {"all": True}) == {
        "resent": 4, "done": [], "missing": [],
    }  # fmt: skip
    assert await api.ask("POST", "/dead/fails/g/purge", {"all": True}) == {"purged": 0}


@pytest.mark.parametrize("what", ["resend", "purge"])
async def test_no_dead_letter_is_dealt_with_if_a_broker_is_away(api: Api, what: str) -> None:
    subject = f"away-{what}"
    send(api, "b1", subject, 2)
    with api.client("b1") as client, client.consumer(subject, "g") as consumer:
        for message in consumer.pull(timeout=5.0):
            message.reject("bad")
    api.cluster.known["x"] = server("x", state="silent")

    refused = await api.ask("POST", f"/dead/{subject}/g/{what}", {"all": True}, 503)

    assert "no answer of x, so nothing was changed" in refused["message"]
    assert len((await api.get(f"/dead/{subject}/g"))["items"]) == 2
    del api.cluster.known["x"]
    done = await api.ask("POST", f"/dead/{subject}/g/{what}", {"all": True})
    assert 2 in done.values()


# ── stored messages ────────────────────────────────────────────────────────────────────────────


async def test_messages_of_all_brokers_are_found_and_shown(api: Api) -> None:
    receipts = []
    for name in NAMES:
        with api.client(name) as client:
            receipts += [client.send("orders", b"%d" % n, key=f"k{n % 2}") for n in range(4)]
            client.send("invoices", b"\xff", key="k1")

    found = await api.get("/messages", subject="orders", key="k1")
    assert found["unreachable"] == []
    assert {(row["broker_group"], row["sequence"]) for row in found["items"]} == {
        (name, sequence) for name in NAMES for sequence in (1, 3)
    }
    assert {row["key"] for row in found["items"]} == {"k1"}
    assert all(row["body"] is None and row["size"] == 1 for row in found["items"])
    times = [row["stored_at"] for row in found["items"]]
    assert times == sorted(times, reverse=True)
    assert len((await api.get("/messages", subject="orders", limit=3))["items"]) == 3

    by_id = await api.get(f"/messages/{receipts[5].id}")
    assert (by_id["body"], by_id["broker_group"], by_id["sequence"]) == ("1", NAMES[1], 1)
    place: dict[str, Any] = {"broker_group": NAMES[0], "partition": "invoices", "sequence": 0}
    at = await api.get("/messages/at", **place)
    assert (at["body"], at["body_base64"]) == (None, "/w==")

    await api.get("/messages", status=404, subject="nothing", key="a")
    await api.get(f"/messages/{'0' * 32}", status=404)
    await api.get("/messages/at", status=404, **{**place, "sequence": 7})
    await api.get("/messages/at", status=404, **{**place, "broker_group": "b9"})
    await api.get("/messages/xyz", status=422)
    for name, wrong in (("limit", 0), ("limit", 1001), ("key", ""), ("since", "soon")):
        await api.get("/messages", status=422, subject="orders", **{name: wrong})
    hours = {"since": "2026-01-01T01:00:00Z", "until": "2026-01-01T00:00:00Z"}
    await api.get("/messages", status=422, subject="orders", **hours)


async def test_a_broker_that_does_not_answer_is_named_by_a_search(api: Api) -> None:
    with api.client("b1") as client:
        receipt = client.send("orders", b"1", key="k")
    api.cluster.known["x"] = server("x", state="silent")

    found = await api.get("/messages", subject="orders", key="k")
    assert [row["id"] for row in found["items"]] == [receipt.id]
    assert [each["broker"] for each in found["unreachable"]] == ["x"]
    assert (await api.get(f"/messages/{receipt.id}"))["id"] == receipt.id
    missing = await api.get(f"/messages/{'0' * 32}", status=503)
    assert "x" in missing["message"]


# ── the cluster ────────────────────────────────────────────────────────────────────────────────


async def test_only_listed_settings_change_and_only_within_their_bounds(api: Api) -> None:
    shown = await api.ask("PATCH", "/config", {"create": "beforehand", "allowed": ["order.*"]})

    assert {row["key"]: row["value"] for row in shown["items"]} == {
        "create": "beforehand",
        "allowed": ["order.*"],
        "spread": 2,
    }
    assert shown == await api.get("/config")
    for wrong in (
        {"storage.directory": "/etc"},
        {"spread": 0},
        {"spread": "3"},
        {"create": "exec"},
        ["create"],
        None,
    ):
        found = await api.ask("PATCH", "/config", wrong, status=422)
        assert found["error"] == "InvalidRequestError"
    found = await api.ask("PATCH", "/config", {"allowed": ["../x"]}, status=422)
    assert found["error"] == "InvalidNameError"
    assert "pattern '^" not in found["message"]
    assert shown == await api.get("/config")


async def test_definitions_of_one_cluster_make_another_like_it(api: Api) -> None:
    for name in ("one", "two"):
        await api.ask("POST", "/subjects", {"subject": name}, status=201)
    await api.ask("POST", "/subjects/two/extend", {"partitions": 4})
    await api.ask("PUT", "/subjects/one/read-only", {"read_only": True})
    await api.ask("PATCH", "/config", {"create": "beforehand"})
    for name in NAMES:
        send(api, name, "one", 1)
        consume(api, name, "one", "exported", acked=0, tags=["t"])

    exported = await api.get("/definitions")
    groups = [each for each in exported["groups"] if each["group"] == "exported"]
    assert groups == [
        {
            "group": "exported",
            "subject": "one",
            "mode": "shared",
            "filter": {"any_of": ["t"], "all_of": []},
            "retry": {"delays_seconds": [], "jitter": None, "max_attempts": None},
        }
    ]
    wanted = {**exported, "groups": [{**groups[0], "group": "imported", "mode": "once"}]}

    api.cluster.placed.clear()
    api.cluster.marks.clear()
    await api.ask("PATCH", "/config", {"create": "first-send"})
    dry = await api.ask("PUT", "/definitions", wanted)
    assert (dry["created"], dry["marked"], dry["policies"]) == (["one", "two"], ["one"], True)
    assert (await api.get("/subjects"))["items"] == []
    await api.ask("PUT", "/definitions?dry_run=false", wanted)
    after = await api.get("/definitions")
    assert {k: after[k] for k in ("policies", "subjects", "read_only")} == {
        k: exported[k] for k in ("policies", "subjects", "read_only")
    }
    (told,) = (await api.get("/groups/imported"))["settings"]
    assert (told["mode"], told["filter"]["any_of"]) == ("once", ["t"])
    again = await api.ask("PUT", "/definitions?dry_run=false", wanted)
    assert (again["created"], again["extended"], again["marked"]) == ([], [], [])


async def test_definitions_carry_the_order(api: Api) -> None:
    for name in ("loose", "strict"):
        await api.ask("POST", "/subjects", {"subject": name}, status=201)
    await api.ask("PUT", "/subjects/strict/order", {"order": "strict"})
    exported = {**await api.get("/definitions"), "groups": []}
    orders = {each["subject"]: each["order"] for each in exported["subjects"]}
    assert orders == {"loose": "best-effort", "strict": "strict"}

    api.cluster.placed.clear()
    api.cluster.orders.clear()
    dry = await api.ask("PUT", "/definitions", exported)
    assert (dry["created"], dry["ordered"]) == (["loose", "strict"], ["strict"])
    done = await api.ask("PUT", "/definitions?dry_run=false", exported)
    assert done["ordered"] == ["strict"]
    assert (await api.get("/definitions"))["subjects"] == exported["subjects"]
    # What a file of before does not say stays as it is.
    unsaid = {**exported, "subjects": [{"subject": "loose"}, {"subject": "strict"}]}
    done = await api.ask("PUT", "/definitions?dry_run=false", unsaid)
    assert done["ordered"] == []
    assert (await api.get("/subjects/strict"))["order"] == "strict"


async def test_groups_that_are_short_of_copies_are_counted(api: Api) -> None:
    def led(name: str, group: str, *, is_in_sync: bool = True, least: int = 2) -> None:
        api.cluster.known[name] = server(
            name, broker_group=group, epoch=1, is_in_sync=is_in_sync, min_in_sync=least
        )

    led("whole-1", "whole")
    led("whole-2", "whole")
    assert (await api.get("/cluster"))["short_of_copies"] == 0
    led("behind-1", "behind")
    led("behind-2", "behind", is_in_sync=False)
    assert (await api.get("/cluster"))["short_of_copies"] == 1
    led("alone-1", "alone")
    assert (await api.get("/cluster"))["short_of_copies"] == 2
    led("content-1", "content", least=1)
    assert (await api.get("/cluster"))["short_of_copies"] == 2


async def test_the_cluster_is_shown_and_says_how_it_is(api: Api) -> None:
    api.cluster.known["b3"] = server("b3", state="silent")

    shown = await api.get("/cluster")

    assert shown["cluster"] == api.cluster.id
    assert shown["brokers"] == {"ready": 2, "silent": 1}
    assert shown["short_of_copies"] == 0
    assert (await api.http.get("/healthz")).json() == {"status": "ok"}
    assert (await api.http.get("/readyz")).status_code == 200
    api.cluster.is_away = True
    away = await api.http.get("/readyz")
    assert (away.status_code, away.json()["retry"]) == (503, True)
    assert (await api.http.get("/healthz")).status_code == 200
