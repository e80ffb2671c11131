"""What is refused before it is looked at: foreign pages, huge, deep and wrong bodies."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import pytest

from pulque.admin.http.guard import MAX_BODY, MAX_BRACKETS, MAX_DEPTH, Refusal, check_json
from tests.unit.admin.conftest import Api

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:7480", "127.0.0.1.evil.example", "10.0.0.1", "", "localhost:x",
     "127.0.0.1@evil.example", "[::2]:80", "0.0.0.0"],
)  # fmt: skip
async def test_a_foreign_host_is_refused_even_for_reading(api: Api, host: str) -> None:
    answer = await api.http.get("/api/v1/subjects", headers={"host": host})

    assert (answer.status_code, answer.json()["error"]) == (403, "NotAllowedError")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:7480", "127.0.0.1:1", "[::1]:7480", "127.8.9.1"]
)
async def test_loopback_hosts_are_ours(api: Api, host: str) -> None:
    assert (await api.http.get("/api/v1/subjects", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:3000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_a_foreign_page_changes_nothing(api: Api, headers: dict[str, str]) -> None:
    body = json.dumps({"subject": "orders"})
    for method, path in (("POST", "/subjects"), ("PATCH", "/config"), ("DELETE", "/brokers/b1")):
        answer = await api.http.request(
            method, f"/api/v1{path}", content=body, headers=JSON | headers
        )
        assert answer.status_code == 403
    assert api.cluster.placed == {}


async def test_our_own_page_may(api: Api) -> None:
    own = {"origin": "http://127.0.0.1:7480", "sec-fetch-site": "same-origin"}
    answer = await api.http.post(
        "/api/v1/subjects", content=b'{"subject": "orders"}', headers=JSON | own
    )

    assert answer.status_code == 201


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None,
     "text/plain; application/json"],
)  # fmt: skip
async def test_what_a_form_can_send_changes_nothing(api: Api, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = await api.http.post(
        "/api/v1/subjects", content=b'{"subject": "orders"}', headers=headers
    )

    assert answer.status_code == 415
    assert api.cluster.placed == {}


async def test_a_huge_body_is_refused_before_it_is_read(api: Api) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 65536
            yield b" " * 65536
            await asyncio.sleep(0)

    told = {**JSON, "content-length": str(10**12)}
    for headers in (told, JSON):
        answer = await api.http.post("/api/v1/subjects", content=endless(), headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (413, "MessageTooLargeError")
    assert read <= MAX_BODY + 4 * 65536


@pytest.mark.parametrize(
    "body",
    [
        b"[" * (MAX_DEPTH + 1),
        b'{"a":' * (MAX_DEPTH + 1),
        b"[" * 500_000 + b"]" * 500_000,
        b"[]," * (MAX_BRACKETS + 1),
    ],
)
async def test_a_deep_or_crowded_body_is_refused(api: Api, body: bytes) -> None:
    started = time.monotonic()
    answer = await api.http.put("/api/v1/definitions", content=body, headers=JSON)

    assert answer.status_code == 413
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
async def test_a_deep_body_cannot_hide_in_another_encoding(api: Api, encoding: str) -> None:
    # One byte of this character is a quotation mark: to a scan of bytes the rest is a string.
    body = ('["\u2201",' + "[" * 10_000 + "]" * 10_001).encode(encoding)
    answer = await api.http.put("/api/v1/definitions", content=body, headers=JSON)

    assert (answer.status_code, answer.json()["error"]) == (400, "InvalidRequestError")
    assert "UTF-8" in answer.json()["message"]


@pytest.mark.parametrize(
    "piece",
    [b'\\"', b'"', b'"",', b"\\", b"[", b"]", b"[]", b'["]', b'""]', b'"\\', b'[""]', b"1"],
)
@pytest.mark.parametrize("start", [b"", b'"', b"["])
def test_a_body_of_any_shape_is_looked_at_in_no_time(start: bytes, piece: bytes) -> None:
    body = start + piece * (MAX_BODY // len(piece))
    before = time.process_time()
    with contextlib.suppress(Refusal):
        check_json(body)

    assert time.process_time() - before < 1


def test_what_closes_more_than_was_opened_hides_nothing() -> None:
    check_json(b"]" * 100)
    with pytest.raises(Refusal):
        check_json(b'"unclosed\\\\"' + b"[" * (MAX_DEPTH + 1) + b"]" * 100)


def test_brackets_in_strings_do_not_count() -> None:
    check_json(json.dumps({"text": "[" * 1000 + '"' + "{" * 1000}).encode())
    check_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(Refusal):
        check_json(b'["\\\\"' + b"[" * MAX_DEPTH)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"orders"',
        b'{"subject": 7}',
        b'{"subject": "\\ud800"}',
        b'{"\\ud800": 1, "subject": "x"}',
        b'{"subject": "a\\u001b[31m"}',
        b'{"subject": "../etc"}',
        b'{"subject": "%retry%a%b"}',
        b'{"subject": ""}',
        b'{"subject": "' + b"a" * 256 + b'"}',
        b'{"subject": "x", "more": 1}',
        b"1" * 5000,
        b'{"subject": NaN}',
        b"1e999",
    ],
)
async def test_a_wrong_body_is_refused_in_plain_words(api: Api, body: bytes) -> None:
    answer = await api.http.post("/api/v1/subjects", content=body, headers=JSON)

    assert answer.status_code in {400, 422}
    assert answer.text.isascii()
    assert answer.json()["message"].isprintable()
    assert answer.json()["error"] in {"InvalidRequestError", "InvalidNameError"}
    assert api.cluster.placed == {}


@pytest.mark.parametrize(
    "name", ["%1b%5b31m", "a%00b", "a%0ab", "%2e%2e", "a%20b", "%C2%9b", "a" * 300, "%FF"]
)
async def test_a_name_with_control_characters_is_refused_and_shown_escaped(
    api: Api, name: str
) -> None:
    for path in (f"/subjects/{name}", f"/brokers/{name}", f"/groups/{name}/lag"):
        answer = await api.http.get(f"/api/v1{path}")
        assert answer.status_code in {404, 422}
        assert answer.json()["message"].isprintable()


async def test_a_compressed_body_is_refused(api: Api) -> None:
    headers = {**JSON, "content-encoding": "gzip"}
    answer = await api.http.post("/api/v1/subjects", content=b"x", headers=headers)

    assert answer.status_code == 415
