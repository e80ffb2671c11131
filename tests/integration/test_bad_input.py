"""Garbage, lies, slow and dead clients get a typed error or a closed connection, and no more.

While a test attacks, a bystander sends and pulls without noticing. After each test nothing new
is stored, memory and descriptors are as before, and the log holds no traceback.
"""

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulque.errors import (
    ErrorCode,
    InvalidBatchError,
    InvalidNameError,
    InvalidRequestError,
    MessageTooLargeError,
    NotAllowedError,
    OverloadedError,
    PulqueError,
    RemoteProtocolError,
    StaleSettleError,
    UnsupportedError,
    error_from_wire,
)
from pulque.model.batch import HEADER, HEADER_SIZE, Codec, layout_of, read_header, seal, seed_of
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.testing.process import BrokerProcess
from pulque.wire.frame import FRAME_HEADER_SIZE, MAX_PAYLOAD, pack_frame_header
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    LATEST,
    Acks,
    Heartbeat,
    Hello,
    Nacked,
    Opcode,
    Positions,
    Pull,
    Read,
    Request,
    Route,
    Seal,
    Send,
    Settle,
    Status,
    Wanted,
)
from pulque.wire.responses import Located, Pulled, ReadBack, Sent, Settled, Welcome
from tests.malformed import torn
from tests.robustness.brokers import Footprint, flags, wait_until
from tests.robustness.bystander import Bystander
from tests.robustness.raw import Closed, RawClient, bodies_of, make_batch, messages_in

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bad_input")]

SETTINGS = {
    "limits.handshake_timeout": "1s",
    "limits.frame_timeout": "1s",
    "limits.idle_timeout": "4s",
    "limits.max_connections": 120,
}
SWEEP = 1.0
"""Time-outs are looked at once a second."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    data = tmp_path_factory.mktemp("bad") / "data"
    with BrokerProcess.start(data, arguments=flags(SETTINGS)) as process:
        yield process


@pytest.fixture(scope="module")
def bystander(broker: BrokerProcess) -> Iterator[Bystander]:
    with Bystander(broker.url) as found:
        found.check()
        yield found


@pytest.fixture(autouse=True)
def unharmed(broker: BrokerProcess, bystander: Bystander) -> Iterator[None]:
    """What holds after every attack."""
    bystander.check(slowest=5)
    footprint = Footprint(broker.pid)
    segments = count_segments(broker)
    yield
    assert broker.is_running
    bystander.check()
    # Some frames ask for a new segment: its file is kept open, and of 32 also the index.
    added = count_segments(broker) - segments
    footprint.base_descriptors += added + min(added, 32)
    footprint.check(within=8)
    assert "Traceback" not in broker.stderr
    assert "request_failed" not in broker.stderr


def count_segments(broker: BrokerProcess) -> int:
    return len(list(broker.data.glob("*/*.log")))


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RawClient]:
    with RawClient(broker.url) as found:
        yield found


@pytest.fixture
def plain(broker: BrokerProcess) -> Iterator[RawClient]:
    """A connection without its handshake."""
    with RawClient(broker.url, hello=False) as found:
        yield found


def partitions(client: RawClient) -> set[str]:
    return {row["name"] for row in client.status()["partitions"]}


def refused(client: RawClient, data: bytes, *, within: float = 1.0) -> PulqueError:
    """Send bytes; return the error that comes back before the connection is closed."""
    client.socket.sendall(data)
    answer = client.get()
    assert isinstance(answer, PulqueError), answer
    assert "Traceback" not in str(answer)
    assert client.is_closed(within)
    return answer


def outcome_of(client: RawClient, partition: str, batch: bytes) -> PulqueError:
    """Send a batch that must not be stored; return why it is not."""
    (outcome,) = client.expect(Sent, Send(Acks.DISK, 1000, ((partition, batch),))).outcomes
    return error_from_wire(outcome.code, outcome.text)


# -- frames ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x80000000, MAX_PAYLOAD + 1])
@pytest.mark.parametrize("opcode", [Opcode.SEND, Opcode.PULL])
def test_a_frame_that_announces_too_much_is_refused_at_once(
    client: RawClient, size: int, opcode: Opcode
) -> None:
    error = refused(client, pack_frame_header(opcode, 1, size, 1, 0))

    assert isinstance(error, RemoteProtocolError)
    assert f"{size} bytes" in str(error)


def test_before_the_handshake_only_small_frames_are_taken(plain: RawClient) -> None:
    error = refused(plain, pack_frame_header(Opcode.HELLO, 1, 8 * 1024 + 1, 1, 0))

    assert "at most 8192" in str(error)


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("opcode", [o for o in Opcode if o not in {Opcode.STATUS, Opcode.SEAL}])
def test_a_payload_that_is_too_short_for_its_opcode_is_refused(
    client: RawClient, opcode: Opcode, size: int
) -> None:
    data = pack_frame_header(opcode, 1, size, 7, 0) + b"\x00" * size

    assert isinstance(refused(client, data), RemoteProtocolError)


@pytest.mark.parametrize("request_", [Status(), Seal(), Route("s"), Positions("s", 0)])
def test_a_payload_with_bytes_to_spare_is_refused(client: RawClient, request_: Request) -> None:
    frame = client.frame(request_)
    size = len(frame) - FRAME_HEADER_SIZE + 3
    longer = pack_frame_header(request_.opcode, 1, size, 1, 0) + frame[FRAME_HEADER_SIZE:] + b"abc"

    assert "3 bytes too many" in str(refused(client, longer))


def test_a_list_that_announces_more_than_there_is_is_refused(client: RawClient) -> None:
    payload = struct.pack("<BIH", 1, 1000, 0xFFFF)
    data = pack_frame_header(Opcode.SEND, 1, len(payload), 1, 0) + payload

    assert isinstance(refused(client, data), RemoteProtocolError)


def test_a_blob_that_announces_more_than_there_is_is_refused(client: RawClient) -> None:
    payload = struct.pack("<BIHH1sI", 1, 1000, 1, 1, b"s", 0xFFFFFFFF)
    data = pack_frame_header(Opcode.SEND, 1, len(payload), 1, 0) + payload

    assert "4294967295 bytes announced" in str(refused(client, data))


def test_a_text_that_is_not_utf_8_is_refused(client: RawClient) -> None:
    payload = struct.pack("<H4s", 4, b"\xff\xfe\x00\x80")
    data = pack_frame_header(Opcode.ROUTE, 1, len(payload), 1, 0) + payload

    assert "not UTF-8" in str(refused(client, data))


@pytest.mark.parametrize("opcode", [0, 30, 31, 127, 128, 131, 255])
def test_an_unknown_opcode_is_refused_and_the_connection_goes_on(
    client: RawClient, opcode: int
) -> None:
    client.socket.sendall(pack_frame_header(opcode, 1, 3, 9, 0) + b"abc")
    answer = client.get()

    assert isinstance(answer, UnsupportedError)
    assert "3 send" in str(answer)
    assert client.status()["connections"] > 0


@pytest.mark.parametrize("version", [0, 2, 255])
def test_an_unknown_version_is_refused_and_the_connection_goes_on(
    client: RawClient, version: int
) -> None:
    client.socket.sendall(pack_frame_header(Opcode.STATUS, version, 0, 9, 0))
    answer = client.get()

    assert isinstance(answer, UnsupportedError)
    assert "known is 1" in str(answer)
    assert client.status()["connections"] > 0


# -- strangers and the handshake ---------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),  # TLS ClientHello
        b"\x00\x00\x00\x00",
        b"QP",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        bytes(range(256)),
    ],
    ids=["tls", "zeros", "reversed magic", "ssh", "all bytes"],
)
def test_bytes_of_something_else_are_answered_with_a_close(plain: RawClient, data: bytes) -> None:
    began = time.monotonic()

    assert isinstance(refused(plain, data), RemoteProtocolError)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("method", ["GET / HTTP/1.1", "POST /x HTTP/1.0", "HEAD / HTTP/1.1"])
def test_http_gets_a_hint_that_people_can_read(plain: RawClient, method: str) -> None:
    plain.socket.sendall(f"{method}\r\nHost: x\r\n\r\n".encode())
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := plain.socket.recv(4096):
            answer += part

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"This port speaks the protocol of Pulque" in answer


@pytest.mark.parametrize(
    "request_",
    [
        Route("s"),
        Send(Acks.DISK, 1, (("early", make_batch("early", [b"x"])),)),
        Pull("g", "c", 1, 1, 1, 0, EARLIEST, (Wanted("s", 0),)),
        Status(),
        Seal(),
        Read("s", 0, 1, 1, 0),
        Heartbeat("g", "c", 1),
    ],
    ids=lambda request: type(request).__name__,
)
def test_anything_before_the_handshake_is_refused(plain: RawClient, request_: Request) -> None:
    error = refused(plain, plain.frame(request_))

    assert "must be a Hello" in str(error)


@pytest.mark.parametrize(("oldest", "newest"), [(0, 0), (2, 255), (5, 1)])
def test_a_handshake_without_a_common_version_is_refused_and_may_be_repeated(
    plain: RawClient, oldest: int, newest: int
) -> None:
    answer = plain.ask(Hello(oldest, newest, "future"))

    assert isinstance(answer, UnsupportedError)
    assert isinstance(plain.ask(Hello(1, 9, "now")), Welcome)


def test_an_unknown_way_to_prove_oneself_is_refused(plain: RawClient) -> None:
    answer = plain.ask(Hello(1, 1, "x", "\x1b[31mSCRAM\n", b"\x00" * 100))

    assert isinstance(answer, UnsupportedError)
    assert "\x1b" not in str(answer)


# -- slow, silent and many ---------------------------------------------------------------------


def drip(client: RawClient, data: bytes, *, pause: float, within: float) -> float:
    """Send one byte after the other; return after how long the broker had enough."""
    began = time.monotonic()
    client.socket.setblocking(False)
    for byte in data:
        try:
            client.socket.send(bytes([byte]))
            if not client.socket.recv(100):
                break
        except BlockingIOError:
            pass
        except ConnectionError:
            break
        assert time.monotonic() - began < within, "the broker listens patiently"
        time.sleep(pause)
    return time.monotonic() - began


def test_a_frame_that_comes_byte_by_byte_is_cut_off_in_time(client: RawClient) -> None:
    frame = client.frame(Read("s" * 200, 0, 1, 1, 0))

    assert drip(client, frame, pause=0.2, within=1 + 2 * SWEEP + 0.5) > 0.9


def test_a_handshake_that_comes_byte_by_byte_is_cut_off_in_time(plain: RawClient) -> None:
    frame = plain.frame(Hello(1, 1, "s" * 200))

    assert drip(plain, frame, pause=0.2, within=1 + 2 * SWEEP + 0.5) > 0.9


def test_a_connection_that_says_nothing_is_closed(
    plain: RawClient, client: RawClient, broker: BrokerProcess
) -> None:
    with RawClient(broker.url) as inside_frame:
        inside_frame.socket.sendall(pack_frame_header(Opcode.SEND, 1, 1000, 1, 0))

        assert plain.is_closed(within=1 + 2 * SWEEP)
        assert inside_frame.is_closed(within=1 + 2 * SWEEP)
        assert client.is_closed(within=4 + 2 * SWEEP)


def test_a_pull_that_waits_keeps_its_connection_and_has_its_time(client: RawClient) -> None:
    began = time.monotonic()
    answer = client.ask(Pull("g", "patient", 1, 1, 1, 5000, EARLIEST, (Wanted("empty", -1),)))

    assert isinstance(answer, Pulled)
    assert 4.9 < time.monotonic() - began < 6
    # Waiting was not being idle: the connection serves on, well past the next sweep.
    assert not client.is_closed(within=1.5 * SWEEP)
    client.status()


def test_a_hundred_connections_without_a_handshake_are_closed_and_hinder_nobody(
    broker: BrokerProcess,
) -> None:
    silent = [RawClient(broker.url, hello=False) for _ in range(100)]
    began = time.monotonic()
    with RawClient(broker.url) as client:
        client.status()

    assert time.monotonic() - began < 1
    assert all(each.is_closed(within=1 + 2 * SWEEP) for each in silent)
    for each in silent:
        each.close()


def test_more_connections_than_allowed_are_refused_and_room_is_found_again(
    broker: BrokerProcess,
) -> None:
    allowed = SETTINGS["limits.max_connections"]
    assert isinstance(allowed, int)
    clients = []
    error: PulqueError | None = None
    for _ in range(allowed + 1):
        client = RawClient(broker.url, hello=False)
        clients.append(client)
        with contextlib.suppress(OSError):
            client.socket.sendall(client.frame(Hello(1, 1, "one more")))
        answer = client.get()
        if isinstance(answer, PulqueError):
            error = answer
            break
    for client in clients:
        client.close()

    assert isinstance(error, OverloadedError)
    assert error.retryable
    wait_until(lambda: _is_welcome(broker.url), within=2, what="a connection is taken again")


def _is_welcome(url: str) -> bool:
    with RawClient(url, hello=False) as client:
        return isinstance(client.ask(Hello(1, 1, "again")), Welcome)


def test_a_client_that_never_reads_costs_little_and_is_cut_off(
    broker: BrokerProcess, client: RawClient, bystander: Bystander
) -> None:
    for _ in range(4):
        client.send("heavy", [os.urandom(1000)] * 2000, acks=Acks.MEMORY)
    bystander.check()
    footprint = Footprint(broker.pid)
    deaf = []
    for _ in range(5):
        each = RawClient(broker.url, hello=False)
        each.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        hello = each.frame(Hello(1, 1, "deaf"))
        reads = [each.frame(Read("heavy", 0, 10_000, 2**23, 0)) for _ in range(500)]
        each.socket.sendall(hello + b"".join(reads))
        deaf.append(each)
    bystander.check()

    assert footprint.grown_mib < 64  # 9 MiB for each, once: one answer past the first megabyte
    bystander.check()
    # Not read from, so that nothing moves: whether it was cut off is seen by writing.
    wait_until(lambda: all(_is_cut(each) for each in deaf), within=10, what="they are cut off")
    for each in deaf:
        each.close()


def _is_cut(client: RawClient) -> bool:
    client.socket.setblocking(False)
    try:
        client.socket.send(b"P")
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False


def test_a_peer_that_vanished_without_a_word_is_found_out(broker: BrokerProcess) -> None:
    client = RawClient(broker.url)
    client.put(Pull("g", "gone", 1, 1, 1, 1000, EARLIEST, (Wanted("empty", -1),)))
    repair = 19
    try:
        # A socket in this state is closed without telling the other side.
        client.socket.setsockopt(socket.IPPROTO_TCP, repair, 1)
    except PermissionError:
        pytest.skip("only root may close a socket without a word")
    connections = Footprint(broker.pid).descriptors
    client.close()

    wait_until(
        lambda: Footprint(broker.pid).descriptors < connections,
        within=4 + 2 * SWEEP,
        what="the connection is closed",
    )


def test_a_thousand_requests_may_wait_on_one_connection_and_no_more(client: RawClient) -> None:
    wanted = (Wanted("empty", -1),)
    for _ in range(1000):
        client.put(Pull("g", "many", 1, 1, 1, 60_000, EARLIEST, wanted))
    answer = client.ask(Pull("g", "many", 1, 1, 1, 60_000, EARLIEST, wanted))

    assert isinstance(answer, OverloadedError)
    assert client.status()["pulls_waiting"] == 1000


# -- names -------------------------------------------------------------------------------------

BAD_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "../../etc/passwd",
    "a/../b",
    "/etc/x",
    "a\x00b",
    "a\nb",
    "\x1b[31mred",
    "a b",
    "x" * 256,
    "x" * 10_000,
    "trailing.",
    "a..b",
    "ünïcode",
    "\u202egnp.exe",
    "😀",
    "%retry%x",
    "%other%s%g",
    "<script>alert(1)</script>",
    "a;rm -rf",
    "#1",
    "s#",
    "s#a#b",
    "-s",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name[:20]))
def test_a_bad_subject_is_refused_and_nothing_is_made(
    client: RawClient, broker: BrokerProcess, name: str
) -> None:
    before, files = partitions(client), _files(broker.data)
    wanted = (Wanted(name, FROM_SETTLED),)
    answers = [
        outcome_of(client, name, make_batch(name, [b"x"])),
        client.ask(Route(name)),
        client.ask(Read(name, 0, 1, 1, 0)),
        client.ask(Positions(name)),
        client.ask(Pull("g", "c", 1, 1, 1, 0, LATEST, wanted)),
    ]

    assert [type(answer) for answer in answers] == [InvalidNameError] * len(answers)
    assert all("\x1b" not in str(answer) and "\n" not in str(answer) for answer in answers)
    assert partitions(client) == before
    assert _files(broker.data) == files


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.suffix not in {".checkpoint", ".tmp"}}


@pytest.mark.parametrize("name", ["", "a\nb", "a b", "x" * 10_000, "\x1b[31m", "%g", "../g"])
def test_a_bad_group_or_consumer_is_refused(client: RawClient, name: str) -> None:
    wanted = (Wanted("empty", FROM_SETTLED),)
    tenure = Tenure(Epoch(0), StartCount(1))
    answers = [
        client.ask(Pull(name, "c", 1, 1, 1, 0, EARLIEST, wanted)),
        client.ask(Pull("g", name, 1, 1, 1, 0, EARLIEST, wanted)),
        client.ask(Heartbeat(name, "c", 1)),
        client.ask(Heartbeat("g", name, 1)),
        client.ask(Settle("empty", name, "c", 1, tenure, 0, 0)),
        client.ask(Settle("empty", "g", name, 1, tenure, 0, 0)),
    ]

    assert [type(answer) for answer in answers] == [InvalidNameError] * len(answers)


def test_nobody_sends_to_or_pulls_from_the_partitions_of_a_group(client: RawClient) -> None:
    mine = "%retry%s%mine"

    error = outcome_of(client, mine, make_batch(mine, [b"x"]))
    answer = client.ask(Pull("other", "c", 1, 1, 1, 0, EARLIEST, (Wanted(mine, -1),)))

    assert isinstance(error, NotAllowedError)
    assert isinstance(answer, NotAllowedError)


# -- batches -----------------------------------------------------------------------------------


def with_header(batch: bytes, partition: str, **changes: int) -> bytes:
    """Change a batch's header and make its crc right again."""
    header = read_header(batch)._replace(**changes)
    return seal(HEADER.pack(*header)[4:] + batch[HEADER_SIZE:], seed_of(partition))


def test_a_batch_whose_crc_is_wrong_is_not_stored(client: RawClient) -> None:
    batch = bytearray(make_batch("fresh", [b"body"]))
    batch[-1] ^= 1

    assert isinstance(outcome_of(client, "fresh", bytes(batch)), InvalidBatchError)
    assert "fresh" not in partitions(client)


def test_a_batch_of_another_partition_is_not_stored(client: RawClient) -> None:
    error = outcome_of(client, "fresh", make_batch("other", [b"body"]))

    assert isinstance(error, InvalidBatchError)
    assert "its partition" in str(error)
    assert not {"fresh", "other"} & partitions(client)


@pytest.mark.parametrize("count", [0, 10_001, 0xFFFFFFFF])
def test_a_batch_of_none_or_too_many_is_not_stored(client: RawClient, count: int) -> None:
    error = outcome_of(
        client, "fresh", with_header(make_batch("fresh", [b"x"]), "fresh", count=count)
    )

    assert isinstance(error, InvalidBatchError)
    assert "1 to 10000" in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": 0xFFFF},
        {"codec": 3},
        {"codec": 255},
        {"priority": 10},
        {"count": 2},
        {"count": 9999},
        {"records_size": 0},
        {"records_size": 0xFFFFFFFF},
        {"records_size": 64 * 1024 * 1024},
        {"flags": 4},
        {"flags": 2 | 64 | 128},
    ],
    ids=str,
)
def test_a_batch_whose_header_lies_is_not_stored(
    client: RawClient, changes: dict[str, int]
) -> None:
    error = outcome_of(
        client, "fresh", with_header(make_batch("fresh", [b"x"]), "fresh", **changes)
    )

    assert isinstance(error, InvalidBatchError | UnsupportedError)
    assert "fresh" not in partitions(client)


def test_a_batch_whose_sizes_lie_is_not_stored(client: RawClient) -> None:
    batch = make_batch("fresh", [b"0123456789"] * 3)
    for sizes in ((0xFFFFFFFF, 0, 31), (10, 10, 11), (0, 0, 0)):
        rest = batch[4:HEADER_SIZE] + struct.pack("<3I", *sizes) + batch[HEADER_SIZE + 12 :]
        error = outcome_of(client, "fresh", seal(rest, seed_of("fresh")))

        assert isinstance(error, InvalidBatchError | MessageTooLargeError)
    assert "fresh" not in partitions(client)


@pytest.mark.parametrize("size", [0, 1, 3, HEADER_SIZE - 1])
def test_a_batch_shorter_than_its_header_is_not_stored(client: RawClient, size: int) -> None:
    assert isinstance(outcome_of(client, "fresh", b"\x00" * size), InvalidBatchError)


def test_a_message_of_exactly_the_limit_is_stored_and_one_byte_more_is_not(
    client: RawClient,
) -> None:
    limit = 4 * 1024 * 1024

    assert client.send("sizes", [b"", b"x" * limit]).first_sequence == 0
    error = outcome_of(client, "sizes", make_batch("sizes", [b"x" * (limit + 1)]))

    assert isinstance(error, MessageTooLargeError)
    assert [len(message.body) for message in client.stored("sizes")] == [0, limit]


def test_a_batch_over_the_limit_is_refused_and_the_connection_goes_on(client: RawClient) -> None:
    error = outcome_of(client, "large", make_batch("large", [b"x" * 2**20] * 16))

    assert isinstance(error, MessageTooLargeError)
    assert "large" not in partitions(client)


def test_a_send_of_no_batch_or_of_very_many_is_refused(client: RawClient) -> None:
    batch = make_batch("fresh", [b"x"])
    answers = [
        client.ask(Send(Acks.DISK, 1, ())),
        client.ask(Send(Acks.DISK, 1, (("fresh", batch),) * 1025)),
    ]

    assert [type(answer) for answer in answers] == [InvalidRequestError] * 2
    assert "fresh" not in partitions(client)


def test_good_batches_of_a_send_are_stored_beside_a_bad_one(client: RawClient) -> None:
    good = make_batch("good", [b"x"])
    request = Send(Acks.DISK, 1, (("good", good), ("../bad", good), ("bad", good)))
    codes = [outcome.code for outcome in client.expect(Sent, request).outcomes]

    assert [code.name for code in codes] == ["NONE", "INVALID_NAME", "INVALID_BATCH"]
    assert "bad" not in partitions(client)


def test_a_bomb_is_refused_or_taken_apart_within_its_limits(
    client: RawClient, broker: BrokerProcess
) -> None:
    """Sixty megabytes of nothing, in a few kilobytes: as large as a batch may become."""
    batch = make_batch("bomb", [bytes(6000)] * 10_000, codec=Codec.ZSTD)
    assert len(batch) < 600_000
    client.send_batch("bomb", batch)
    delivered = client.pull("bomb", group="bombed").deliveries[0]
    first = delivered.first_pull
    client.settle("bomb", delivered, group="bombed", nacked=[first, first + 1])

    retry = "%retry%bomb%bombed"
    retried = client.expect(
        Pulled, Pull("bombed", "c", 1, 10, 2**20, 5000, EARLIEST, (Wanted(retry, -1),))
    )
    assert [bodies_of(retry, each) for each in retried.deliveries] == [[bytes(6000)] * 2]
    wait_until(
        lambda: Footprint(broker.pid).mib < 160, within=5, what="what was unpacked is given back"
    )


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_a_batch_that_does_not_decompress_is_a_dead_letter_when_it_is_nacked(
    client: RawClient, codec: Codec
) -> None:
    """A broker opens no records, so it stores what only looks well; nobody can read it later."""
    name = f"poison-{codec.name}"
    spoilt = torn(name, codec)
    assert client.send_batch(name, spoilt).code is ErrorCode.NONE
    delivered = client.pull(name).deliveries[0]
    client.settle(name, delivered, nacked=[0])

    dead = f"%dead%{name}%g"
    wait_until(lambda: dead in partitions(client), within=5, what="a dead letter")
    (letter,) = client.stored(dead)
    assert letter.body == spoilt
    assert letter.headers["pulque.unreadable"] == "0"
    assert client.send(name, [b"after"]).first_sequence == 3


@pytest.mark.parametrize(
    ("part", "size"), [("key_size", 500), ("headers_size", 2**31), ("tags_size", 0xFFFF)]
)
def test_a_batch_whose_inner_columns_lie_is_refused(
    client: RawClient, part: str, size: int
) -> None:
    name = f"inner-{part.replace('_', '-')}"
    flag, width = {"key_size": (2, "<H"), "headers_size": (128, "<I"), "tags_size": (1, "<H")}[
        part
    ]
    layout = layout_of(flag)
    visible = {"size": struct.pack("<I", 10), "tag_bits": bytes(8), "key_hash": bytes(4)}
    columns = b"".join(
        visible.get(c.name, bytes(c.width)) if c.name != part else struct.pack(width, size)
        for c in layout.columns
    )
    header = read_header(make_batch(name, [b"x"]))._replace(
        flags=flag, records_size=layout.record_width + 10
    )
    batch = seal(HEADER.pack(*header)[4:] + columns + b"x" * 10, seed_of(name))

    assert client.send_batch(name, batch).code is ErrorCode.INVALID_BATCH
    assert client.send(name, [b"after"]).first_sequence == 0


def nonsense(draw: random.Random, partition: str) -> bytes:
    """Return a batch with anything inside; a broker takes it if the sizes fit each other."""
    flags = draw.randrange(512) & ~4
    layout = layout_of(flags)
    count = draw.choice([1, 2, 7])
    sizes = [draw.choice([0, 1, 30, 200]) for _ in range(count)]
    columns = b"".join(
        struct.pack(f"<{count}I", *sizes)
        if column.name == "size"
        else _filler(draw, column.width * count)
        for column in layout.columns
    )
    header = read_header(make_batch(partition, [b"x"]))._replace(
        flags=flags,
        count=count,
        records_size=count * layout.record_width + sum(sizes),
        created_at_ms=draw.choice([0, -1, 2**63 - 1, -(2**63)]),
        tag_union=draw.randrange(2**64),
    )
    data = _filler(draw, sum(sizes))
    return seal(HEADER.pack(*header)[4:] + columns + data, seed_of(partition))


def _filler(draw: random.Random, size: int) -> bytes:
    return draw.choice([bytes(size), b"\xff" * size, draw.randbytes(size), b"\x01\x00" * size])[
        :size
    ]


def test_batches_of_nonsense_that_are_nacked_harm_nobody(
    client: RawClient, broker: BrokerProcess, seed: int
) -> None:
    draw = random.Random(seed)
    name = f"nonsense-{draw.randrange(2**32)}"
    codes = [client.send_batch(name, nonsense(draw, name)).code for _ in range(300)]
    before = client.status()["deliveries_nacked"]
    nacked = 0
    while deliveries := client.pull(name).deliveries:
        for each in deliveries:
            sequences = range(each.first_pull, each.first_pull + each.count)
            client.settle(name, each, nacked=sequences)
            nacked += each.count

    assert set(codes) == {ErrorCode.NONE, ErrorCode.INVALID_BATCH}
    assert client.status()["deliveries_nacked"] == before + nacked
    wait_until(
        lambda: not any(row["redeliveries_pending"] for row in client.status()["groups"]),
        within=10,
        what="all are redelivered, or known to be unreadable",
    )
    retry = (Wanted(f"%retry%{name}%g", -1),)
    again = client.expect(Pulled, Pull("g", "c", 1, 9999, 2**22, 1000, EARLIEST, retry))
    for each in again.deliveries:
        bodies_of(retry[0].partition, each)


# -- pulls, reads and positions ----------------------------------------------------------------


@pytest.fixture
def numbers(client: RawClient) -> str:
    """A partition of ten messages."""
    name = f"numbers-{random.randrange(2**32)}"
    client.send(name, [str(i).encode() for i in range(10)])
    return name


@pytest.mark.parametrize(("messages", "size"), [(0, 1), (1, 0), (0, 0)])
def test_a_pull_or_read_of_nothing_is_refused(
    client: RawClient, numbers: str, messages: int, size: int
) -> None:
    wanted = (Wanted(numbers, -1),)

    for request in (
        Pull("g", "c", 1, messages, size, 0, EARLIEST, wanted),
        Read(numbers, 0, messages, size, 0),
    ):
        assert isinstance(client.ask(request), InvalidRequestError)


def test_the_largest_numbers_are_cut_to_what_is_allowed(client: RawClient, numbers: str) -> None:
    most = 0xFFFFFFFF
    pulled = client.expect(
        Pulled, Pull("g", "c", 2**64 - 1, most, most, most, EARLIEST, (Wanted(numbers, -1),))
    )
    read = client.expect(ReadBack, Read(numbers, 0, most, most, most))

    assert [each.count for each in pulled.deliveries] == [10]
    assert read.count == 10


@pytest.mark.parametrize("expected", [1, 2**31, 2**63 - 1])
def test_a_pull_from_beyond_the_end_says_that_the_position_is_lost(
    client: RawClient, numbers: str, expected: int
) -> None:
    pulled = client.pull(numbers, expected=expected)

    assert [state.code.name for state in pulled.states] == ["POSITION_LOST"]
    assert not pulled.deliveries


@pytest.mark.parametrize("expected", [-2, -(2**63)])
def test_a_pull_from_before_the_beginning_begins_there(
    client: RawClient, numbers: str, expected: int
) -> None:
    assert client.pull(numbers, expected=expected).deliveries[0].first_sequence == 0


@pytest.mark.parametrize("start", [-(2**63), -3, 2**63 - 1, 10, 11])
def test_a_group_may_start_anywhere_and_gets_what_is_there(
    client: RawClient, numbers: str, start: int
) -> None:
    request = Pull(f"from{start}", "c", 1, 100, 10_000, 0, start, (Wanted(numbers, -1),))
    counts = [each.count for each in client.expect(Pulled, request).deliveries]

    assert counts == ([10] if start < 0 else [])


@pytest.mark.parametrize("sequence", [10, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_read_beyond_the_end_gets_nothing(
    client: RawClient, numbers: str, sequence: int
) -> None:
    found = client.expect(ReadBack, Read(numbers, sequence, 10, 1000, 10))

    assert (found.count, found.start, found.end) == (0, 0, 10)


@pytest.mark.parametrize(("at_ms", "sequence"), [(-(2**63), 0), (0, 0), (2**63 - 1, 10)])
def test_any_instant_has_a_position(
    client: RawClient, numbers: str, at_ms: int, sequence: int
) -> None:
    assert client.expect(Located, Positions(numbers, at_ms)).at == sequence


def test_a_pull_from_too_many_partitions_is_refused(client: RawClient) -> None:
    many = tuple(Wanted(f"p{i}", -1) for i in range(10_001))
    answers = [
        client.ask(Pull("g", "c", 1, 1, 1, 0, EARLIEST, ())),
        client.ask(Pull("g", "c", 1, 1, 1, 0, EARLIEST, many)),
    ]

    assert [type(answer) for answer in answers] == [InvalidRequestError] * 2


def test_pulls_for_very_many_partitions_cannot_pile_up(client: RawClient) -> None:
    def waiting(prefix: str) -> Pull:
        wanted = tuple(Wanted(f"{prefix}{i}", -1) for i in range(6000))
        return Pull("g", "c", 1, 1, 1, 60_000, EARLIEST, wanted)

    client.put(waiting("a"))

    assert isinstance(client.ask(waiting("b")), OverloadedError)


# -- settles -----------------------------------------------------------------------------------


def test_settles_that_cannot_be_are_refused_and_settle_nothing(
    client: RawClient, numbers: str
) -> None:
    delivered = client.pull(numbers, max_messages=6).deliveries[0]
    tenure = delivered.tenure
    other = Tenure(Epoch(0), StartCount(tenure.start + 1))

    def settle(
        first: int,
        last: int,
        *,
        group: str = "g",
        consumer: str = "c",
        tenure: Tenure = tenure,
        nacked: tuple[int, ...] = (),
    ) -> object:
        refusals = tuple(Nacked(sequence, -1, "") for sequence in nacked)
        return client.ask(Settle(numbers, group, consumer, 1, tenure, first, last, refusals))

    invalid = [settle(3, 2), settle(0, 5, nacked=(6,)), settle(0, 5, nacked=(3, 3))]
    invalid += [settle(0, 5, nacked=(3, 2)), settle(2, 5, nacked=(1,))]
    stale = [settle(0, 6), settle(0, 2**64 - 1), settle(6, 7), settle(1, 2), settle(5, 5)]
    stale += [settle(0, 5, tenure=other), settle(0, 5, tenure=Tenure(Epoch(9), StartCount(0)))]
    stale += [settle(0, 5, consumer="somebody"), settle(0, 5, group="others")]

    assert [type(answer) for answer in invalid] == [InvalidRequestError] * len(invalid)
    assert [type(answer) for answer in stale] == [StaleSettleError] * len(stale)
    again = client.pull(numbers, max_messages=6).deliveries[0]
    assert (again.first_pull, again.count) == (0, 6)


def test_a_settle_that_is_repeated_or_overlaps_changes_nothing_twice(
    client: RawClient, numbers: str
) -> None:
    tenure = client.pull(numbers).deliveries[0].tenure

    def settle(first: int, last: int, *nacked: int) -> int:
        refusals = tuple(Nacked(sequence, -1, "no") for sequence in nacked)
        request = Settle(numbers, "g", "c", 1, tenure, first, last, refusals)
        return client.expect(Settled, request).settled

    assert settle(0, 3, 1) == 4
    assert settle(0, 3, 1) == 4
    assert settle(2, 5) == 6
    assert settle(0, 9, 1, 7) == 10
    retry = (Wanted(f"%retry%{numbers}%g", -1),)
    seen: list[bytes] = []
    while len(seen) < 2:
        pulled = client.expect(Pulled, Pull("g", "r", 1, 9, 999, 2000, EARLIEST, retry))
        assert pulled.deliveries, seen
        for each in pulled.deliveries:
            seen += bodies_of(retry[0].partition, each)
            client.settle(retry[0].partition, each, consumer="r")
    assert sorted(seen) == [b"1", b"7"]
    assert not client.expect(Pulled, Pull("g", "r", 1, 9, 999, 0, EARLIEST, retry)).deliveries


def test_a_settle_with_long_reasons_is_taken_and_they_are_cut(
    client: RawClient, numbers: str
) -> None:
    tenure = client.pull(numbers).deliveries[0].tenure
    reasons = ("x" * 60_000, "\x00\x1b[31m", "é" * 1000)
    nacked = tuple(Nacked(i, 0, reason) for i, reason in enumerate(reasons))
    client.expect(Settled, Settle(numbers, "g", "c", 1, tenure, 0, 9, nacked))
    retry = (Wanted(f"%retry%{numbers}%g", -1),)
    pulled = client.expect(Pulled, Pull("g", "r", 1, 9, 2**20, 2000, EARLIEST, retry))

    records = pulled.deliveries[0].records
    assert not isinstance(records, tuple)
    kept = [message.headers["pulque.reason"] for message in messages_in("r", records)]
    assert all(len(reason) <= 1000 and "\x00" not in reason for reason in kept)


# -- mutated frames ----------------------------------------------------------------------------

MUTATIONS = int(os.environ.get("PULQUE_MUTATIONS", "5000"))
FUZZED = b"body of a fuzzed frame"


def valid_frames(client: RawClient) -> list[bytes]:
    batch = make_batch("fuzz", [FUZZED, FUZZED])
    tenure = Tenure(Epoch(0), StartCount(1))
    wanted = (Wanted("fuzz", -1), Wanted("%retry%fuzz%g", -1))
    requests: list[Request] = [
        Hello(1, 1, "x"),
        Route("fuzz"),
        Send(Acks.DISK, 100, (("fuzz", batch),)),
        Send(Acks.MEMORY, 100, (("fuzz", batch), ("fuzz", batch))),
        Pull("g", "c", 1, 10, 1000, 0, EARLIEST, wanted),
        Pull("g", "c", 1, 10, 1000, 50, LATEST, wanted[:1]),
        Settle("fuzz", "g", "c", 1, tenure, 0, 1, (Nacked(0, -1, "no"),)),
        Settle("fuzz", "g", "c", 1, tenure, 0, 0),
        Heartbeat("g", "c", 1),
        Heartbeat("g", "c", 1, is_leaving=True),
        Read("fuzz", 0, 10, 1000, 0),
        Positions("fuzz", 0),
        Status(),
    ]
    return [client.frame(request) for request in requests]


def mutated(draw: random.Random, frames: list[bytes]) -> bytes:
    data = bytearray(draw.choice(frames))
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        at = draw.randrange(len(data)) if data else 0
        match draw.randrange(7):
            case 0:
                data[at : at + 1] = bytes([data[at] ^ (1 << draw.randrange(8))]) if data else b""
            case 1:
                data[at : at + 1] = draw.randbytes(1)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = draw.randbytes(draw.randrange(1, 20))
            case 4:
                size = draw.choice([1, 2, 4, 8])
                data[at : at + size] = draw.choice([b"\x00", b"\xff", b"\x7f"]) * size
            case 5:
                data += draw.choice(frames)
            case _:
                data[4:8] = struct.pack("<I", draw.choice([0, 1, 7, len(data), 2**31, 2**32 - 1]))
    return bytes(data)


@pytest.mark.timeout(60 + MUTATIONS // 50)
def test_thousands_of_mutated_frames_store_nothing_that_was_not_sent(
    broker: BrokerProcess, client: RawClient, seed: int
) -> None:
    draw = random.Random(seed)
    frames = valid_frames(client)
    for number in range(MUTATIONS):
        data = mutated(draw, frames)
        with RawClient(broker.url, hello=False) as each:
            each.socket.sendall(each.frame(Hello(1, 1, "fuzz")) + data)
            each.socket.shutdown(socket.SHUT_WR)
            try:
                while True:
                    answer = each.get()
                    assert "Traceback" not in str(answer), (number, data.hex())
            except Closed:
                pass

    # A new connection: on a busy machine the old one was idle for longer than is allowed.
    with RawClient(broker.url) as again:
        assert {message.body for message in again.stored("fuzz")} <= {FUZZED}
