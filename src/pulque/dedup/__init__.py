"""Checkers for consumers: has this message been handled before?

Delivery is at least once, so a message can come twice: after a crash between the work and its
ack, or to another consumer after a lease ran out. A checker identifies messages by id and group::

    checker = MemoryChecker()
    for message in consumer:
        with checker.once(message) as is_first:
            if is_first:
                handle(message.body)
        message.ack()

``MemoryChecker`` remembers for one process, ``pulque.dedup.sql.SqlChecker`` in a table that all
consumers share; its ``mark`` inside the transaction of the work itself makes the work happen
effectively once.
"""

from pulque.dedup.checker import Checker
from pulque.dedup.memory import MemoryChecker

__all__ = ["Checker", "MemoryChecker"]
