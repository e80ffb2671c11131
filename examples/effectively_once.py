"""A message that comes twice, and a ticket that is sold once: the checker shares the transaction.

python examples/effectively_once.py
"""

import sqlalchemy as sa

import pulque
from pulque.dedup.sql import SqlChecker

engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
tickets = sa.Table("tickets", sa.MetaData(), sa.Column("seat", sa.String(10)))
tickets.create(engine)
checker = SqlChecker(engine, group="box-office")
checker.create_table()


def sell(message: pulque.Message) -> None:
    with engine.begin() as connection:
        is_first = checker.mark(connection, message)
        if is_first:
            connection.execute(tickets.insert().values(seat=message.body.decode()))
    print("sold" if is_first else "was sold before")


with pulque.connect() as client:
    client.send("seat.paid", b"row 7")

    with client.consumer("seat.paid", group="box-office") as consumer:
        (message,) = consumer.pull(timeout=30)
        sell(message)
        # It ends before the ack, so the message comes again.

    with client.consumer("seat.paid", group="box-office") as consumer:
        (message,) = consumer.pull(timeout=30)
        sell(message)
        message.ack()

with engine.connect() as connection:
    print(f"seats sold: {len(connection.execute(tickets.select()).all())}")
