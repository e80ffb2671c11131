"""One message as commands print it."""

from collections.abc import Mapping
from enum import StrEnum

from pulque.cli.common.output import instant, print_bytes, print_json, print_line, print_table
from pulque.client.inspecting.stored_messages import text_or_base64
from pulque.model.message import Message
from pulque.settings.foreign import escaped

__all__ = ["MessageOutput", "message_fields", "message_line", "print_message", "print_whole"]

_MOST_BODY = 1000


class MessageOutput(StrEnum):
    """How messages are printed."""

    TABLE = "table"
    JSON = "json"
    RAW = "raw"


def print_message(message: Message, output: MessageOutput) -> None:
    """Print one message: a line for people, a JSON object, or the body and a line end."""
    match output:
        case MessageOutput.JSON:
            print_json(message_fields(message))
        case MessageOutput.RAW:
            print_bytes(message.body + b"\n")
        case MessageOutput.TABLE:
            print_line(message_line(message))


def print_whole(message: Message, output: MessageOutput) -> None:
    """Print all that there is to say about one message; for people, as tables."""
    if output is not MessageOutput.TABLE:
        print_message(message, output)
        return
    fields = message_fields(message)
    del fields["headers"]
    print_table(("what", "value"), [(name, str(value)) for name, value in fields.items()])
    if message.headers:
        print_line("")
        print_table(("header", "value"), list(message.headers.items()))


def message_fields(message: Message) -> dict[str, object]:
    """Return what there is to say about a message; its body is text, or base64 if it is none."""
    return {
        "id": message.id,
        "subject": message.subject,
        "partition": message.partition,
        "broker_group": message.broker_group,
        "sequence": message.sequence,
        "key": message.key,
        "order_key": message.order_key,
        "tags": list(message.tags),
        "headers": message.headers,
        **_body_field(message.body),
        "attempt": message.attempt,
        "priority": message.priority,
        "created_at": instant(message.created_at_ms),
        "stored_at": instant(message.stored_at_ms),
    }


def message_line(message: Message) -> str:
    """Return a message in one line: where and when, what is unusual about it, the body."""
    parts = [instant(message.stored_at_ms), f"{message.partition}/{message.sequence}"]
    if message.attempt > 1:
        parts.append(f"attempt={message.attempt}")
    if message.key is not None:
        parts.append(f"key={_word(message.key)}")
    if message.order_key is not None:
        parts.append(f"order_key={_word(message.order_key)}")
    if message.tags:
        parts.append(f"tags={','.join(map(_word, message.tags))}")
    parts += _header_parts(message.headers)
    parts.append(_shown_body(message.body))
    return " ".join(parts)


def _header_parts(headers: Mapping[str, str]) -> list[str]:
    return [f"{_word(name)}={_word(value)}" for name, value in headers.items()]


def _word(text: str) -> str:
    shown = escaped(text)
    return f'"{shown}"' if not shown or " " in shown or "=" in shown else shown


def _body_field(body: bytes) -> dict[str, object]:
    text, encoded = text_or_base64(body)
    return {"body": text} if encoded is None else {"body_base64": encoded}


def _shown_body(body: bytes) -> str:
    shown = body[:_MOST_BODY].decode(errors="backslashreplace")
    more = f" … ({len(body)} bytes)" if len(body) > _MOST_BODY else ""
    return f"{shown}{more}"
