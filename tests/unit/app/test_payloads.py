"""Bodies become what a handler's type hints ask for, or a clear reason why not."""

import builtins
import contextlib
import sys
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal, TypedDict

import hypothesis.strategies as st
import msgspec
import pydantic
import pytest
from hypothesis import given

from pulque.app.payload import PayloadError, decoder_of
from pulque.client.sending.body_encoding import encode_payload
from pulque.errors import UsageError


@dataclass
class Line:
    item: str
    count: int = 1


@dataclass
class Order:
    number: int
    lines: list[Line] = field(default_factory=list)
    paid_at: datetime | None = None


class Struct(msgspec.Struct, forbid_unknown_fields=True):
    number: Annotated[int, msgspec.Meta(gt=0)]


class Model(pydantic.BaseModel):
    number: pydantic.PositiveInt
    kind: Literal["tea", "coffee"] = "tea"


@pydantic.dataclasses.dataclass
class ModelDataclass:
    number: pydantic.PositiveInt


class Row(TypedDict):
    number: int


@pytest.mark.parametrize(
    ("wanted", "body", "value"),
    [
        (bytes, b"\xff\0", b"\xff\0"),
        (str, "naïve".encode(), "naïve"),
        (dict, b'{"a": [1]}', {"a": [1]}),
        (dict[str, Any], b'{"a": null}', {"a": None}),
        (dict[str, int], b'{"a": 1}', {"a": 1}),
        (list, b"[1, 2]", [1, 2]),
        (list[int], b"[1, 2]", [1, 2]),
        (Any, b"17", 17),
        (object, b'"text"', "text"),
        (int, b"17", 17),
        (int | None, b"null", None),
        (
            Order,
            b'{"number": 1, "lines": [{"item": "tea"}], "paid_at": "2026-11-16T03:00:00Z"}',
            Order(1, [Line("tea")], datetime.fromisoformat("2026-11-16T03:00:00Z")),
        ),
        (Struct, b'{"number": 1}', Struct(1)),
        (Row, b'{"number": 1}', {"number": 1}),
        (list[Order], b'[{"number": 1}]', [Order(1)]),
        (Model, b'{"number": 1}', Model(number=1)),
        (ModelDataclass, b'{"number": 1}', ModelDataclass(1)),
        (list[Model], b'[{"number": 1}]', [Model(number=1)]),
        (Model | None, b"null", None),
    ],
)
def test_a_body_becomes_what_is_asked_for(wanted: Any, body: bytes, value: object) -> None:
    assert decoder_of(wanted)(body) == value


@pytest.mark.parametrize(
    ("wanted", "body", "reason"),
    [
        (str, b"\xff", "the body is no str: .*can't decode"),
        (dict, b"[1]", "the body is no dict: a JSON dict is wanted, it is a list"),
        (dict, b"", "the body is no dict: Expecting value"),
        (dict, b'{"a": NaN}', "NaN is not JSON"),
        (dict, b"\xff\xfe", "the body is no dict"),
        (list, b"[" * 100_000, "the body is no list"),
        (list[int], b'["1"]', "got `str`"),
        (Order, b'{"number": "1"}', "the body is no Order: Expected `int`, got `str`"),
        (Order, b'{"number": 1.5}', "the body is no Order"),
        (Order, b"{}", "missing required field `number`"),
        (Order, b'{"number": 1, "lines": [{"item": 1}]}', r"\$\.lines\[0\]\.item"),
        (Order, b"[" * 100_000, "the body is no Order"),
        (Struct, b'{"number": 0}', "the body is no Struct"),
        (Struct, b'{"number": 1, "more": 1}', "unknown field `more`"),
        (Model, b'{"number": 0}', "the body is no Model: .*greater than 0"),
        (Model, b"garbage", "the body is no Model: .*Invalid JSON"),
        (Model, b'{"number": 1, "kind": "milk"}', "the body is no Model"),
    ],
)
def test_a_body_that_is_not_gets_a_reason(wanted: Any, body: bytes, reason: str) -> None:
    with pytest.raises(PayloadError, match=reason) as raised:
        decoder_of(wanted)(body)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("wanted", [dict, list, Any, Order, Struct, Row, Model, list[Model], str])
@given(body=st.binary(max_size=200) | st.text(max_size=50).map(str.encode))
def test_no_body_raises_anything_else(wanted: Any, body: bytes) -> None:
    with contextlib.suppress(PayloadError):
        decoder_of(wanted)(body)


@pytest.mark.parametrize("wanted", [17, "Order", complex | bytearray | Struct | Order, range])
def test_what_nothing_can_be_decoded_into_is_refused_at_once(wanted: Any) -> None:
    with pytest.raises(UsageError, match="no body can be decoded into"):
        decoder_of(wanted)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name in {"msgspec", "pydantic"}:
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "msgspec")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"into Order: pip install 'pulque\[typed\]'"):
        decoder_of(Order)
    assert decoder_of(dict)(b"{}") == {}
    assert encode_payload(Order(1)) == b'{"number": 1, "lines": [], "paid_at": null}'


@pytest.mark.parametrize(
    ("value", "body"),
    [
        (b"\xff", b"\xff"),
        (bytearray(b"a"), b"a"),
        (memoryview(b"a"), b"a"),
        ("naïve", "naïve".encode()),
        ({"a": [1, None]}, b'{"a": [1, None]}'.replace(b"None", b"null")),
        ({"lines": [Line("tea")]}, b'{"lines": [{"item": "tea", "count": 1}]}'),
        (Line("tea"), b'{"item": "tea", "count": 1}'),
        (Struct(1), b'{"number":1}'),
        (Model(number=1), b'{"number":1,"kind":"tea"}'),
        ([Model(number=1)], b'[{"number": 1, "kind": "tea"}]'),
        (17, b"17"),
        (None, b"null"),
    ],
)
def test_a_value_becomes_a_body(value: object, body: bytes) -> None:
    assert encode_payload(value) == body


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}, {"a": b"bytes"}])
def test_what_is_no_json_is_not_sent(value: object) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        encode_payload(value)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text()
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).filter(lambda value: not isinstance(value, str))
)
def test_what_is_sent_is_what_arrives(value: object) -> None:
    assert decoder_of(Any)(encode_payload(value)) == value
