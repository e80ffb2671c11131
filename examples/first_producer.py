"""Send a few messages.

pulque up                            in one shell, then
python examples/first_producer.py    in another
"""

import pulque

# Finds the broker by PULQUE_URL, else on this machine.
with pulque.connect() as client:
    # Returns once the message is on disk, or raises.
    receipt = client.send("tea.ordered", b"one green tea", key="table-4", tags=["hot"])
    print(f"sent {receipt.id} as {receipt.partition}/{receipt.sequence}")

    # A producer batches underneath: for many messages, it is far faster.
    with client.producer() as producer:
        pending = [producer.send("tea.ordered", f"tea {n}".encode()) for n in range(1, 1000)]
    for each in pending:
        each.result()  # a receipt for every message, or what went wrong
    print(f"sent {len(pending)} more")
