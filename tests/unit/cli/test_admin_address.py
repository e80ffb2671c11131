"""Where the administration API is, by what servers say of themselves."""

from collections.abc import Mapping
from typing import Any

import pytest

from pulque.cli.common.admin_address import FoundApi, find_admin
from pulque.client.connection.url import Address
from pulque.errors import DisconnectedError, RequestTimeoutError, UnavailableError

ADMIN = "http://127.0.0.1:7480"
BROKER, META, OTHER = (Address("127.0.0.1", port) for port in (7450, 7440, 7441))


class Servers:
    """What servers say, by address; one that is not there does not answer."""

    def __init__(self, reports: Mapping[Address, Any]) -> None:
        self._reports = reports
        self.asked: list[Address] = []

    def ask(self, address: Address) -> Mapping[str, Any]:
        self.asked.append(address)
        found = self._reports.get(address, DisconnectedError(f"nobody answers at {address}"))
        if isinstance(found, Exception):
            raise found
        report: Mapping[str, Any] = found
        return report


def meta(admin: object = ADMIN) -> dict[str, Any]:
    return {"meta": "m", "role": "meta", "cluster": "id", "admin": admin}


def broker(*metas: str, **more: object) -> dict[str, Any]:
    return {"broker": "b1", "cluster": {"id": "id", "meta_servers": list(metas), **more}}


def found(reports: Mapping[Address, Any], *addresses: Address) -> str:
    return find_admin(addresses, Servers(reports).ask).url


def problem(reports: Mapping[Address, Any], *addresses: Address) -> str:
    with pytest.raises(UnavailableError) as caught:
        found(reports, *addresses)
    return str(caught.value)


@pytest.mark.parametrize("admin", [ADMIN, "http://[::1]:7480", "http://localhost:1"])
def test_a_meta_server_says_where_its_own_is(admin: str) -> None:
    assert found({META: meta(admin)}, META) == admin


@pytest.mark.parametrize(
    "report",
    [
        broker("127.0.0.1:7440"),
        broker("127.0.0.1"),
        broker(registered_at=["127.0.0.1:7440"]),  # before brokers named all of them
        {"delay": "d", "cluster": {"id": "id", "meta": ["127.0.0.1:7440"]}},
        broker("127.0.0.1:7441", "127.0.0.1:7440", registered_at=["127.0.0.1:7440"]),
    ],
)
def test_another_server_names_meta_servers_which_are_asked(report: Mapping[str, Any]) -> None:
    servers = Servers({BROKER: report, META: meta()})

    assert find_admin([BROKER], servers.ask) == FoundApi(ADMIN, "id")
    assert servers.asked == [BROKER, META]  # those first that the broker can reach


@pytest.mark.parametrize(
    "first",
    [
        DisconnectedError("gone"),
        RequestTimeoutError("late"),
        meta(""),
        meta("https://127.0.0.1:7480"),
        broker(),
    ],
)
def test_the_next_meta_server_is_asked_if_one_is_away_or_has_none(first: object) -> None:
    metas = ("127.0.0.1:7441", "127.0.0.1:7440")

    assert found({BROKER: broker(*metas), OTHER: first, META: meta()}, BROKER) == ADMIN
    assert found({OTHER: first, META: meta()}, OTHER, META) == ADMIN


def test_each_server_is_asked_once() -> None:
    loop = broker("127.0.0.1:7450", "127.0.0.1:7441")
    servers = Servers({BROKER: loop, OTHER: broker("127.0.0.1:7440"), META: meta()})

    with pytest.raises(UnavailableError):
        find_admin([BROKER, OTHER], servers.ask)
    assert servers.asked == [BROKER, OTHER]


@pytest.mark.parametrize(
    "admin",
    [
        "https://127.0.0.1:7480",
        "ftp://127.0.0.1:7480",
        "file:///etc/passwd",
        "HTTP://127.0.0.1:7480",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:7480/",
        "http://127.0.0.1:7480/api",
        "http://127.0.0.1:7480?x",
        "http://127.0.0.1:7480#x",
        "http://user@127.0.0.1:7480",
        "http://127.0.0.1:7480,http://10.0.0.1:1",
        "http://127.0.0.1:x",
        "http://[::1:7480",
        "http://127.0.0.1:07480",
        " http://127.0.0.1:7480",
        "http://127.0.0.1:7480\n",
        "http://127.0.0.1\t:7480",
        "127.0.0.1:7480",
        7480,
        ["http://127.0.0.1:7480"],
    ],
    ids=repr,
)
def test_only_a_plain_http_url_is_used(admin: object) -> None:
    said = problem({META: meta(admin)}, META)

    assert f"the meta server at 127.0.0.1:7440 says that its API is at {admin!r}" in said
    assert "--admin URL or PULQUE_ADMIN" in said


@pytest.mark.parametrize("admin", ["http://10.0.0.5:7480", "http://example.com:7480"])
def test_only_an_api_on_a_loopback_address_is_used(admin: str) -> None:
    assert "of its own machine" in problem({META: meta(admin)}, META)


def test_another_machines_loopback_address_is_not_ours() -> None:
    far = Address("10.0.0.5", 7440)

    assert "of its own machine" in problem({far: meta()}, far)
    assert "of its own machine" in problem({BROKER: broker("10.0.0.5"), far: meta()}, BROKER)


def test_a_loopback_address_that_another_machine_names_is_not_asked() -> None:
    far = Address("10.0.0.5", 7450)
    servers = Servers({far: broker("127.0.0.1:7440"), META: meta()})

    with pytest.raises(UnavailableError, match="on its own machine: run the command there"):
        find_admin([far], servers.ask)
    assert servers.asked == [far]


@pytest.mark.parametrize("cluster", ["another", "", None, 7])
def test_a_meta_server_of_another_cluster_is_not_used(cluster: object) -> None:
    said = problem(
        {BROKER: broker("127.0.0.1:7440"), META: {**meta(), "cluster": cluster}}, BROKER
    )

    assert "and the server that names its meta server is of cluster 'id'" in said


@pytest.mark.parametrize(
    "report",
    [
        {"broker": "b1", "cluster": {"id": "", "registered_at": [], "meta_servers": []}},
        {"broker": "b1"},
        {"broker": "b1", "cluster": {"meta_servers": "127.0.0.1:7440"}},
        {"broker": "b1", "cluster": {"meta_servers": ["x y", 7440, None, "127.0.0.1:99999"]}},
    ],
    ids=repr,
)
def test_a_lone_broker_is_named_with_what_to_do(report: Mapping[str, Any]) -> None:
    said = problem({BROKER: report}, BROKER)

    assert said.startswith("no administration API is known: the broker at 127.0.0.1:7450 (b1) ")
    assert all(each in said for each in ("`pulque meta`", "`pulque up`", "--admin URL"))


def test_meta_servers_that_are_away_are_named() -> None:
    said = problem({BROKER: broker("127.0.0.1:7440")}, BROKER)

    assert "the broker at 127.0.0.1:7450 (b1) names meta servers at 127.0.0.1:7440" in said
    assert "nobody answers at 127.0.0.1:7440" in said


def test_that_nobody_answers_is_said() -> None:
    with pytest.raises(DisconnectedError, match=r"7450.*7440.*PULQUE_URL"):
        found({}, BROKER, META)


def test_a_broker_cannot_have_any_number_of_servers_asked() -> None:
    servers = Servers({BROKER: broker(*(f"127.0.0.1:{port}" for port in range(1, 1000)))})

    with pytest.raises(UnavailableError):
        find_admin([BROKER], servers.ask)
    assert len(servers.asked) == 65
