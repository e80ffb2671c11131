"""A consumer as a process of its own that writes down what it handled.

``python -m tests.robustness.handling URL GROUP CONSUMER FILE``

It fails on purpose: every fiftieth message for ever, every seventh at the first attempt. What it
handles is in its file before it is acked, so that the file is the truth, whoever is killed.
"""

import os
import sys

import pulque
from pulque.errors import FencedError, PulqueError

__all__ = ["is_poison"]

SUBJECT = "work"
_PATIENCE_S = 10.0


def is_poison(number: int) -> bool:
    """Say whether a message can never be handled."""
    return number % 50 == 0


def _fails(number: int, attempt: int) -> bool:
    return is_poison(number) or (number % 7 == 0 and attempt == 1)


def main(url: str, group: str, consumer_id: str, path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    while True:
        try:
            with pulque.connect(url, timeout=_PATIENCE_S) as client:
                _consume(client, group, consumer_id, file)
        except FencedError:
            return
        except PulqueError as error:
            print(type(error).__name__, error, flush=True)


def _consume(client: pulque.Client, group: str, consumer_id: str, file: int) -> None:
    with client.consumer(SUBJECT, group=group, consumer_id=consumer_id) as consumer:
        for message in consumer:
            number = int(message.body)
            if _fails(number, message.attempt):
                message.nack(f"failed {message.attempt}")
            else:
                os.write(file, b"%d\n" % number)
                message.ack()


if __name__ == "__main__":
    main(*sys.argv[1:])
