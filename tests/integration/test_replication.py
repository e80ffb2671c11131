"""Brokers of one group as real processes: followers have what their leader has, and lead then."""

import asyncio
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import pulque
from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.url import parse_url
from pulque.testing.cluster import ClusterProcesses
from pulque.testing.process import BrokerProcessError, ServerProcess
from pulque.testing.raw import pack_batch
from pulque.wire.requests import Acks, Clients, Request, Send
from pulque.wire.responses import ClientsListed, Response
from tests.malformed import send_batches, torn
from tests.robustness.brokers import wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("replication")]

META = {"cluster": {"heartbeat": "300ms"}, "replication": {"lease": "1s"}}
BROKER = {
    "storage": {"checkpoint_interval": "1s"},
    "consumption": {"lease": "3s", "lease_check": "200ms", "lock": "1s"},
}
BATCH = pack_batch("orders", [b"x"])
WITHIN = 30.0


@pytest.fixture
def lag() -> str:
    """How long a follower may be behind and count as in sync."""
    return "2s"


@pytest.fixture
def cluster(tmp_path: Path, lag: str) -> Iterator[ClusterProcesses]:
    """Three brokers of one group, all in sync."""
    settings = BROKER | {"replication": {"lag": lag}}
    with ClusterProcesses.start(
        tmp_path, brokers=3, copies=3, meta_settings=META, broker_settings=settings
    ) as cluster:
        until_in_sync(cluster, 3)
        yield cluster


def status_of(server: ServerProcess) -> dict[str, Any]:
    with pulque.connect(server.url, timeout=10) as client:
        return client.status()


def leadership(cluster: ClusterProcesses) -> dict[str, Any]:
    found: list[dict[str, Any]] = status_of(cluster["meta-1"])["leaderships"]
    return found[0] if found else {"leader": "", "in_sync": []}  # nobody has asked yet


def leader_of(cluster: ClusterProcesses) -> str:
    return str(leadership(cluster)["leader"])


def followers_of(cluster: ClusterProcesses) -> list[str]:
    return [name for name in cluster.brokers if name != leader_of(cluster)]


def holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except pulque.PulqueError:
        return False


def until(condition: Callable[[], bool], what: str) -> None:
    wait_until(lambda: holds(condition), within=WITHIN, what=what)


def until_in_sync(cluster: ClusterProcesses, count: int) -> None:
    until(lambda: len(leadership(cluster)["in_sync"]) == count, f"{count} brokers are in sync")


def send(cluster: ClusterProcesses, first: int, count: int, **options: Any) -> None:
    with pulque.connect(cluster.url, timeout=WITHIN) as client:
        for number in range(first, first + count):
            client.send("orders", str(number).encode(), **options)


def consume(cluster: ClusterProcesses, group: str, wanted: set[int]) -> list[int]:
    """Return what a group gets until it has all that is wanted, in order."""
    found: list[int] = []
    with (
        pulque.connect(cluster.url, timeout=WITHIN) as client,
        client.consumer("orders", group=group) as consumer,
    ):
        for message in consumer:
            found.append(int(message.body))
            message.ack()
            if wanted <= set(found):
                break
    return found


def ask(server: ServerProcess, request: Request) -> Response | pulque.PulqueError:
    """Return what a server answers, whatever it is."""

    async def asked() -> Response:
        (address,) = parse_url(server.url)
        connection = await AsyncConnection.open(address, client="test", timeout=5)
        try:
            return await connection.request(request, 5, lambda found: found)
        finally:
            await connection.close()

    try:
        return asyncio.run(asked())
    except pulque.PulqueError as error:
        return error


def consumers_at(server: ServerProcess) -> set[str]:
    """Return the consumers that are connected to a server."""
    answer = ask(server, Clients())
    assert isinstance(answer, ClientsListed)
    return {str(each.consumer) for row in answer.clients for each in row.consumers}


def log_of(cluster: ClusterProcesses, name: str) -> dict[str, bytes]:
    folder = cluster.folder / name / "messages"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.log"))}


@pytest.mark.accepts("004-22")
def test_followers_have_the_same_bytes_as_their_leader(cluster: ClusterProcesses) -> None:
    send(cluster, 0, 50)
    leader = leader_of(cluster)
    wanted = log_of(cluster, leader)

    assert any(b"49" in log for log in wanted.values())
    for follower in followers_of(cluster):
        # All that are in sync had it when the send was answered.
        assert log_of(cluster, follower) == wanted


@pytest.mark.accepts("004-23")
def test_only_the_leader_takes_messages(cluster: ClusterProcesses) -> None:
    send(cluster, 0, 1)
    for follower in followers_of(cluster):
        refusal = ask(cluster[follower], Send(Acks.DISK, 1000, (("orders", BATCH),)))

        assert isinstance(refusal, pulque.PulqueError)
        assert f"this broker follows {leader_of(cluster)}" in str(refusal)


def test_what_was_confirmed_survives_the_death_of_the_leader(cluster: ClusterProcesses) -> None:
    send(cluster, 0, 50)
    before = leader_of(cluster)
    cluster[before].kill()
    send(cluster, 50, 50)

    assert leader_of(cluster) != before
    assert set(consume(cluster, "g", set(range(100)))) == set(range(100))


def test_the_disk_of_the_leader_may_be_lost(cluster: ClusterProcesses) -> None:
    send(cluster, 0, 50)
    leader = leader_of(cluster)
    cluster[leader].kill()
    for path in (cluster.folder / leader / "messages").iterdir():
        path.unlink()
    (cluster.folder / leader / "format.json").unlink()
    for path in sorted((cluster.folder / leader).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()

    assert set(consume(cluster, "g", set(range(50)))) == set(range(50))

    cluster[leader].restart()  # under its old name, with nothing
    until_in_sync(cluster, 3)
    assert log_of(cluster, leader) == log_of(cluster, leader_of(cluster))


def test_a_leader_that_was_paused_serves_nobody_when_it_wakes_up(
    cluster: ClusterProcesses,
) -> None:
    send(cluster, 0, 10)
    before = leader_of(cluster)
    cluster[before].send_signal(signal.SIGSTOP)
    send(cluster, 10, 10)
    cluster[before].send_signal(signal.SIGCONT)

    until(
        lambda: status_of(cluster[before])["replication"]["role"] == "follower",
        "the old leader follows",
    )
    until_in_sync(cluster, 3)
    send(cluster, 20, 10)
    assert set(consume(cluster, "g", set(range(30)))) == set(range(30))
    assert log_of(cluster, before) == log_of(cluster, leader_of(cluster))


@pytest.mark.parametrize("lag", ["60s"])
def test_what_a_leader_could_not_confirm_is_dropped_when_it_follows(
    cluster: ClusterProcesses,
) -> None:
    send(cluster, 0, 10)
    before = leader_of(cluster)
    followers = followers_of(cluster)
    for name in followers:
        cluster[name].send_signal(signal.SIGSTOP)
    with pulque.connect(cluster[before].url, timeout=1) as client:
        # The first is on its way to those who waited for it; the second nobody but it has.
        for body in (b"on its way", b"lost"):
            with pytest.raises(pulque.PulqueError):
                client.send("orders", body)
    cluster[before].kill()
    for name in followers:
        cluster[name].send_signal(signal.SIGCONT)
    send(cluster, 10, 10)
    cluster[before].restart()
    until_in_sync(cluster, 3)

    assert log_of(cluster, before) == log_of(cluster, leader_of(cluster))
    assert not any(b"lost" in log for log in log_of(cluster, before).values())
    with pulque.connect(cluster.url, timeout=WITHIN) as client:
        stored = {message.body for message in client.read("orders")}
    assert {str(number).encode() for number in range(20)} <= stored
    assert b"lost" not in stored


def test_a_leader_that_is_stopped_hands_over(cluster: ClusterProcesses) -> None:
    send(cluster, 0, 10)
    before, epoch = leader_of(cluster), leadership(cluster)["epoch"]
    cluster[before].stop()

    assert leader_of(cluster) != before  # at once: nobody waited for a lease
    assert leadership(cluster)["epoch"] == epoch + 1
    send(cluster, 10, 10)
    assert set(consume(cluster, "g", set(range(20)))) == set(range(20))


def test_a_leader_that_is_restarted_leads_on(cluster: ClusterProcesses) -> None:
    send(cluster, 0, 10)
    before = leader_of(cluster)
    cluster[before].kill()
    cluster[before].restart()
    send(cluster, 10, 10)

    assert set(consume(cluster, "g", set(range(20)))) == set(range(20))


def rot(path: Path, body: bytes) -> None:
    """Change a bit of a message, on disk only."""
    content = bytearray(path.read_bytes())
    content[content.index(body)] ^= 1
    path.write_bytes(content)


def reads_all(cluster: ClusterProcesses, count: int) -> bool:
    with pulque.connect(cluster.url, timeout=WITHIN) as client:
        found = {message.body for message in client.read("orders")}
    return found == {str(number).encode() for number in range(count)}


def test_a_leader_that_lost_something_while_it_was_down_does_not_lead_on(
    cluster: ClusterProcesses,
) -> None:
    send(cluster, 0, 50)
    before = leader_of(cluster)
    cluster[before].kill()
    rot(next((cluster.folder / before / "messages").glob("*.log")), b"27")
    cluster[before].restart()

    until(lambda: reads_all(cluster, 50), "all are read, whoever leads")
    until_in_sync(cluster, 3)
    assert leader_of(cluster) != before
    assert log_of(cluster, before) == log_of(cluster, leader_of(cluster))


def test_a_leader_whose_disk_rots_hands_over_and_copies_all_anew(
    cluster: ClusterProcesses,
) -> None:
    send(cluster, 0, 50)
    before = leader_of(cluster)
    sent_s = time.time()
    checkpoints = cluster.folder / before / "checkpoints"
    until(
        lambda: max(each.stat().st_mtime for each in checkpoints.iterdir()) > sent_s,
        "recovery need not look at what is sent",
    )
    path = next((cluster.folder / before / "messages").glob("*.log"))
    cluster[before].kill()  # so that nothing of it is in memory
    rot(path, b"27")
    cluster[before].restart()
    until_in_sync(cluster, 3)
    leader = leader_of(cluster)
    if leader != before and log_of(cluster, before) != log_of(cluster, leader):
        # The restart took longer than the lease: it finds its damage when it leads again.
        assert hand_over_to(cluster, before)["standing"] == "leader"

    until(lambda: reads_all(cluster, 50), "all are read, whoever leads")
    until_in_sync(cluster, 3)
    until(lambda: log_of(cluster, before) == log_of(cluster, leader_of(cluster)), "it is mended")
    assert leader_of(cluster) != before


@pytest.mark.accepts("003-39")
def test_messages_are_taken_only_while_enough_are_in_sync(cluster: ClusterProcesses) -> None:
    send(cluster, 0, 10)
    for name in followers_of(cluster):
        cluster[name].kill()
    until_in_sync(cluster, 1)

    with (
        pulque.connect(cluster[leader_of(cluster)].url, timeout=2) as client,
        pytest.raises(pulque.PulqueError, match="in sync"),
    ):
        client.send("orders", b"10")
    assert set(consume(cluster, "g", set(range(10)))) == set(range(10))  # that goes on

    for name in followers_of(cluster):
        cluster[name].restart()
    until_in_sync(cluster, 3)
    send(cluster, 10, 10)
    assert set(consume(cluster, "h", set(range(20)))) == set(range(20))


def test_what_was_settled_stays_settled_after_a_failover(cluster: ClusterProcesses) -> None:
    send(cluster, 0, 30)
    assert len(consume(cluster, "g", set(range(30)))) == 30

    def have_all() -> bool:
        found = status_of(cluster[leader_of(cluster)])["replication"]
        return all(each["action_synced"] == found["action_end"] for each in found["followers"])

    until(have_all, "the facts are copied")
    cluster[leader_of(cluster)].kill()
    send(cluster, 30, 5)

    assert consume(cluster, "g", set(range(30, 35))) == list(range(30, 35))


def test_all_meta_servers_may_be_away(cluster: ClusterProcesses) -> None:
    send(cluster, 0, 10)
    with pulque.connect(cluster.broker_url, timeout=WITHIN, acks="replica") as client:
        client.send("orders", b"10")
        cluster["meta-1"].kill()
        for number in range(11, 20):
            client.send("orders", str(number).encode())
        with client.consumer("orders", group="g") as consumer:
            found = set()
            for message in consumer:
                found.add(int(message.body))
                message.ack()
                if len(found) == 20:
                    break

    assert found == set(range(20))


def test_replica_is_refused_where_a_broker_stands_alone(tmp_path: Path) -> None:
    with ClusterProcesses.start(tmp_path, brokers=1, meta_settings=META) as cluster:
        with (
            pulque.connect(cluster.url, acks="replica", timeout=5) as client,
            pytest.raises(pulque.NotAllowedError, match="no followers"),
        ):
            client.send("orders", b"x")
        other = cluster.make_broker(
            "second", {"cluster": {"group": "broker-1"}, "replication": {"copies": 2}}
        )
        with pytest.raises(BrokerProcessError, match="stands alone"):
            other.restart()


def take_until(consumer: pulque.Consumer, body: bytes) -> None:
    """Ack what comes, up to a message."""
    for message in consumer:
        message.ack()
        if message.body == body:
            return


@pytest.mark.accepts("004-31")
def test_consumers_are_connected_to_leaders_and_followers_and_say_there_that_they_live(
    cluster: ClusterProcesses,
) -> None:
    send(cluster, 0, 10)
    wanted = {"shared", "everything"}

    def is_known_to(name: str) -> bool:
        return wanted <= consumers_at(cluster[name])

    with (
        pulque.connect(cluster.url, timeout=WITHIN) as client,
        client.consumer("orders", group="g", consumer_id="shared") as shared,
        client.consumer("orders", broadcast=True, consumer_id="everything") as everything,
    ):
        take_until(shared, b"9")
        take_until(everything, b"9")
        for name in cluster.brokers:
            until(partial(is_known_to, name), f"{name} knows both")

        leader, follower = leader_of(cluster), followers_of(cluster)[0]
        cluster[follower].kill()
        send(cluster, 10, 1)
        take_until(shared, b"10")  # it is nobody's trouble

        cluster[follower].restart()
        until(partial(is_known_to, follower), "a follower that comes back hears of them")

        cluster[leader].kill()
        send(cluster, 11, 1)
        take_until(shared, b"11")
        take_until(everything, b"11")


@pytest.mark.accepts("004-31")
def test_handlers_are_known_to_followers_and_called_on_after_a_failover(
    cluster: ClusterProcesses, tmp_path: Path
) -> None:
    """The pushing kind of consumer: functions that are called with messages."""
    app = pulque.App(cluster.url, timeout=WITHIN, state_dir=tmp_path / "state")
    handled: set[bytes] = set()

    @app.subscribe("orders", group="pushed", consumer_id="pushed")
    def take(message: pulque.ReceivedMessage) -> None:
        handled.add(bytes(message.body))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(app.run)
        try:
            send(cluster, 0, 5)
            until(lambda: len(handled) == 5, "all five are handled")
            for name in cluster.brokers:
                until(partial(knows, cluster[name], "pushed"), f"{name} knows it")
            cluster[leader_of(cluster)].kill()
            send(cluster, 5, 5)
            until(lambda: len(handled) == 10, "it goes on at the next leader")
        finally:
            app.stop()
        running.result(WITHIN)


def knows(server: ServerProcess, consumer: str) -> bool:
    return consumer in consumers_at(server)


@pytest.mark.accepts("004-26")
def test_what_a_broker_consists_of_works_on_after_a_failover(cluster: ClusterProcesses) -> None:
    """Connections, clients with what they subscribed to, storage, copies, and the index by key."""
    with pulque.connect(cluster.url, timeout=WITHIN) as client:
        for number in range(20):
            client.send("orders", str(number).encode(), key=f"key-{number}")
        for dead in (None, leader_of(cluster)):
            if dead is not None:
                cluster[dead].kill()
                client.send("orders", b"20", key="key-20")  # waits for the next leader
            with client.consumer("orders", group="g", consumer_id="worker") as consumer:
                message = next(iter(consumer))
                message.ack()
                leader = cluster[leader_of(cluster)]
                listed = ask(leader, Clients())
                assert isinstance(listed, ClientsListed)
                known = {
                    (each.consumer, each.group, each.subject)
                    for row in listed.clients
                    for each in row.consumers
                }
            found = client.messages.find("orders", key="key-7")
            stored = client.read("orders")

            assert ("worker", "g", "orders") in known
            assert [each.body for each in found] == [b"7"]
            assert {each.body for each in stored} >= {str(n).encode() for n in range(20)}
        assert leader_of(cluster) != dead


def hand_over_to(cluster: ClusterProcesses, name: str) -> dict[str, Any]:
    """Hand over to a broker, as ``pulque broker lead`` does; a new leader may refuse it."""
    url = f"{status_of(cluster['meta-1'])['admin']}/api/v1/brokers/{name}/lead"
    answers: list[httpx.Response] = []

    def is_answered() -> bool:
        answers.append(httpx.post(url, json={}, timeout=WITHIN))
        return answers[-1].status_code != httpx.codes.SERVICE_UNAVAILABLE

    until(is_answered, f"{name} may lead")
    assert answers[-1].status_code == httpx.codes.OK, answers[-1].text
    found: dict[str, Any] = answers[-1].json()
    return found


def test_a_leader_hands_over_by_command_while_messages_are_sent(
    cluster: ClusterProcesses,
) -> None:
    sent: list[int] = []
    is_enough = threading.Event()

    def send_on() -> None:
        with pulque.connect(cluster.url, timeout=WITHIN) as client:
            while not is_enough.is_set():
                client.send("orders", str(len(sent)).encode())
                sent.append(len(sent))

    def has_sent_more() -> bool:
        return len(sent) >= before_count + 20

    with ThreadPoolExecutor(1) as executor:
        sending = executor.submit(send_on)
        try:
            for _ in range(2):
                before_count, epoch = len(sent), leadership(cluster)["epoch"]
                until(has_sent_more, "messages are sent")
                chosen = followers_of(cluster)[-1]

                found = hand_over_to(cluster, chosen)

                assert (found["standing"], found["epoch"]) == ("leader", epoch + 1)
                assert leader_of(cluster) == chosen
                assert hand_over_to(cluster, chosen)["epoch"] == epoch + 1  # it leads already
                before_count = len(sent)
                until(has_sent_more, "messages are sent to the new leader")
                until_in_sync(cluster, 3)
        finally:
            is_enough.set()
        sending.result(WITHIN)  # none of them failed

    assert sorted(consume(cluster, "g", set(sent))) == sent


def test_a_leader_whose_disk_is_full_hands_over_to_a_follower_with_room(tmp_path: Path) -> None:
    def settings(**storage: str) -> dict[str, dict[str, Any]]:
        return BROKER | {
            "storage": {"checkpoint_interval": "1s", **storage},
            "cluster": {"group": "group-1"},
            "replication": {"copies": 2},
        }

    # In memory there is never as much room as the one is to leave free.
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        ClusterProcesses(tmp_path) as cluster,
    ):
        cluster.add_meta("meta-1", META)
        full = cluster.add_broker("broker-1", settings(directory=f"{memory}/b", reserve="1TiB"))
        until(lambda: leader_of(cluster) == "broker-1", "the first one leads")
        until(lambda: bool(status_of(full)["is_full"]), "it is full")

        cluster.add_broker("broker-2", settings(reserve="1MiB"))

        until(lambda: leader_of(cluster) == "broker-2", "the one with room leads")
        until_in_sync(cluster, 2)
        send(cluster, 0, 3)
        # It does not hand back to one that is full.
        assert (leader_of(cluster), leadership(cluster)["epoch"]) == ("broker-2", 2)


def test_a_batch_that_nobody_can_decode_is_one_dead_letter_also_after_a_failover(
    cluster: ClusterProcesses,
) -> None:
    bad = torn("orders")
    with pulque.connect(cluster.url, timeout=WITHIN, acks="replica") as client:
        client.send("orders", b"0")
        assert send_batches(cluster[leader_of(cluster)].url, "orders", bad) == ["NONE"]
        client.send("orders", b"1")
        until_in_sync(cluster, 3)
        # One group had its letter before the leader died, the other one gets it afterwards.
        assert consume(cluster, "before", {0, 1}) == [0, 1]
        (letter,) = letters_of(client, "before")
        cluster[leader_of(cluster)].kill()
        client.send("orders", b"2")

        assert consume(cluster, "before", {2}) == [2]
        assert consume(cluster, "after", {0, 1, 2}) == [0, 1, 2]
        assert [each.id for each in letters_of(client, "before")] == [letter.id]
        (other,) = letters_of(client, "after")
        assert letter.body == other.body == bad


def letters_of(client: pulque.Client, group: str) -> list[pulque.Message]:
    """Return the dead letters of a group as soon as they stand for a batch of three messages."""
    found: list[pulque.Message] = []

    def are_there() -> bool:
        found[:] = client.dead("orders", group=group).list()
        return sum(int(each.headers["pulque.unreadable.count"]) for each in found) == 3

    until(are_there, "the letter is there")
    return found
