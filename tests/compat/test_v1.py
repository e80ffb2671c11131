"""Today's code reads what version 1 wrote, and writes the same."""

from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

from pulque.client.persistence.nack_spool import decode_nack
from pulque.client.receiving.saved_positions import decode_positions
from pulque.errors import PulqueError
from pulque.model.batch import Codec, read_header, verify_crc
from pulque.model.gathered import Gathered, read_gathered
from pulque.model.message import Message, StoredBatch
from pulque.model.positions import ConsumeSequence
from pulque.model.record import ENVELOPE_SIZE, read_envelope
from pulque.wire.packet import ANSWERS
from pulque.wire.requests import Request, decode_request, encode_request
from pulque.wire.responses import Response, decode_response, encode_response
from tests.compat import generate
from tests.compat.samples import (
    BATCHES,
    ENVELOPE,
    EPOCH,
    ERROR,
    GATHERED_PLACES,
    GATHERED_TIMES,
    KEPT,
    OWNER,
    PARTITION,
    PLAIN,
    PRODUCED_BY,
    REQUEST_ID,
    REQUESTS,
    RESPONSES,
    SEED,
    SPOOLED,
    Sample,
    encoded,
    made_of,
)
from tests.property.wire_values import copied, frame_of

FOLDER = Path(__file__).parent / "v1"
COMPRESSED = {name for name, (_, codec) in BATCHES.items() if codec is not Codec.NONE}


def golden(name: str) -> bytes:
    return (FOLDER / f"{name}.bin").read_bytes()


def messages_of(batch: bytes) -> list[Message]:
    stored = StoredBatch(
        batch, partition=PARTITION, first_sequence=ConsumeSequence(41), stored_at_ms=0
    )
    return [Message(stored, i) for i in range(len(stored))]


def seen(message: Message) -> dict[str, object]:
    return {
        "id": bytes.fromhex(message.id),
        "body": message.body,
        "key": message.key,
        "order_key": message.order_key,
        "tags": message.tags,
        "headers": message.headers,
        "expires_at_ms": message.expires_at_ms,
        "created_at_ms": message.created_at_ms,
        "attempt": message.attempt,
    }


def expected(sample: Sample) -> dict[str, object]:
    return asdict(sample) | {"headers": dict(sample.headers or {})}


def test_a_gathered_record_is_read_as_what_it_was() -> None:
    found = read_gathered(golden("record-gathered"), 0)

    assert isinstance(found, Gathered)
    assert (found.first_sequence, found.places) == (41, GATHERED_PLACES)
    assert found.stored_at_ms == GATHERED_TIMES
    assert [seen(message) for message in messages_of(found.batch)] == list(map(expected, PLAIN))


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_read_as_what_it_was(name: str) -> None:
    samples, codec = BATCHES[name]
    batch = golden(name)
    header = read_header(batch)

    assert verify_crc(batch, SEED)
    assert [seen(message) for message in messages_of(batch)] == list(map(expected, samples))
    assert (header.codec, header.priority, header.count) == (codec, 6, 3)
    assert header.producer_id == PRODUCED_BY.producer_id
    assert (header.incarnation, header.producer_sequence) == (3, 17)


def test_a_record_is_read_as_what_it_was() -> None:
    record = golden("record-batch")

    assert read_envelope(record) == ENVELOPE
    assert len(record) == ENVELOPE.size
    assert [m.body for m in messages_of(record[ENVELOPE_SIZE:])] == [s.body for s in PLAIN]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_read_as_what_it_was(name: str) -> None:
    frame = frame_of([golden(f"request-{name}")])

    assert (frame.version, frame.request_id, frame.epoch) == (1, REQUEST_ID, EPOCH)
    assert decode_request(frame) == REQUESTS[name]


@pytest.mark.parametrize("name", RESPONSES)
def test_an_answer_is_read_as_what_it_was(name: str) -> None:
    frame = frame_of([golden(f"response-{name}")])
    heard = decode_response(frame)

    assert (frame.version, frame.request_id, frame.epoch) == (1, REQUEST_ID, EPOCH)
    assert not isinstance(heard, PulqueError)
    assert copied(heard) == RESPONSES[name]


@pytest.mark.parametrize("kind", get_args(Request), ids=lambda kind: kind.__name__)
def test_a_request_without_a_sample_gets_one_from_its_declaration(kind: type[Request]) -> None:
    sample = made_of(kind.declared, kind.__name__)

    assert decode_request(frame_of(encode_request(sample, REQUEST_ID, EPOCH))) == sample


@pytest.mark.parametrize("kind", ANSWERS.values(), ids=lambda kind: kind.__name__)
def test_an_answer_without_a_sample_gets_one_from_its_declaration(kind: type[Response]) -> None:
    sample = made_of(kind.declared, kind.__name__)
    heard = decode_response(frame_of(encode_response(sample, REQUEST_ID, EPOCH)))

    assert not isinstance(heard, PulqueError)
    assert copied(heard) == sample


def test_the_files_of_a_consumer_are_read_as_what_they_were() -> None:
    nacks = golden("client-nacks")

    assert decode_positions(golden("client-settled"), OWNER) == KEPT
    assert decode_nack(nacks, 0) == (SPOOLED, len(nacks))


def test_an_error_is_read_as_what_it_was() -> None:
    heard = decode_response(frame_of([golden("response-error")]))

    assert type(heard) is type(ERROR)
    assert str(heard) == str(ERROR)


@pytest.mark.parametrize("name", sorted(set(encoded()) - COMPRESSED))
def test_the_same_bytes_are_written_today(name: str) -> None:
    """Compressed ones are left out: another version of their package may pack tighter."""
    assert encoded()[name] == golden(name)


def test_every_file_is_tested() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(encoded())


def test_files_that_are_there_are_never_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat() for path in FOLDER.iterdir()}

    assert generate.main(["v1"]) == 1

    assert {path: path.stat().st_mtime_ns for path in FOLDER.iterdir()} == {
        path: stat.st_mtime_ns for path, stat in before.items()
    }
    assert "batch-plain.bin is there, and stays as it is" in capsys.readouterr().err
