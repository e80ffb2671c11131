"""What `make demo` shows: a broker of its own, work shared, a retry, and a kill -9.

    python examples/demo.py

It uses a temporary directory and a free port, cleans up, and ends by itself.
"""

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pulque
from pulque.testing.process import BrokerProcess

COUNT = 20_000


def title(text: str, command: str = "") -> None:
    print(f"\n── {text}", flush=True)
    if command:
        print(f"   as a command: {command}", flush=True)


def send(url: str) -> set[str]:
    title(
        f"Send {COUNT:,} messages, each confirmed from disk", "pulque send tea.ordered 'one tea'"
    )
    started = time.monotonic()
    with pulque.connect(url) as client, client.producer(acks="disk") as producer:
        pending = producer.send_many("tea.ordered", [f"tea {n}".encode() for n in range(COUNT)])
        receipts = pending.result(timeout=20)
    elapsed = time.monotonic() - started
    last = receipts[-1]
    print(
        f"   {len(receipts):,} receipts in {elapsed:.2f} s; last {last.partition}/{last.sequence}"
    )
    return {receipt.id for receipt in receipts}


def share(url: str, sent: set[str]) -> set[str]:
    """Consume half of it with two consumers of one group; return which messages they had."""
    title(
        "Two consumers of one group share the work",
        "pulque pull tea.ordered --group kitchen -n 100",
    )
    shares: Counter[str] = Counter()
    done: set[str] = set()

    def cook(name: str) -> None:
        with pulque.connect(url) as client, client.consumer("tea.ordered", "kitchen") as consumer:
            while len(done) < len(sent) // 2:
                for message in consumer.pull(max_messages=500, timeout=1.0):
                    done.add(message.id)
                    shares[name] += 1
                    message.ack()

    cooks = [threading.Thread(target=cook, args=(name,)) for name in ("Ana", "Ben")]
    for thread in cooks:
        thread.start()
    for thread in cooks:
        thread.join()
    print(f"   {', '.join(f'{name} had {count:,}' for name, count in sorted(shares.items()))}")
    return done


def retry(url: str) -> None:
    title("What could not be done comes again", "pulque pull tea.spilt --group kitchen --nack")
    with pulque.connect(url) as client:
        client.send("tea.spilt", b"one tea")
        with client.consumer("tea.spilt", "kitchen") as consumer:
            (first,) = consumer.pull(max_messages=1, timeout=5.0)
            print(f"   attempt {first.attempt}: {first.body.decode()} – spilt, nack")
            first.nack("spilt", delay=0)  # at once; without it, after a second
            (second,) = consumer.pull(max_messages=1, timeout=5.0)
            print(f"   attempt {second.attempt}: {second.body.decode()} – served, ack")
            second.ack()


def survive(broker: BrokerProcess, sent: set[str], done: set[str]) -> None:
    title("kill -9, and start again on the same directory", f"kill -9 {broker.pid}; pulque up")
    broker.kill()
    started = time.monotonic()
    broker.restart()
    print(f"   serving again after {time.monotonic() - started:.2f} s")
    rest: set[str] = set()
    with (
        pulque.connect(broker.url) as client,
        client.consumer("tea.ordered", "kitchen") as consumer,
    ):
        while messages := consumer.pull(max_messages=1000, timeout=1.0):
            rest.update(message.id for message in messages)
            for message in messages:
                message.ack()
    lost = sent - done - rest
    print(f"   the group went on with {len(rest):,} messages; lost: {len(lost)}")
    assert not lost, "this must never happen"
    assert len(rest) < len(sent), "the group began anew"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="pulque-demo-") as folder:
        os.environ["PULQUE_STATE_DIR"] = f"{folder}/state"
        title("Start a broker", "pulque up")
        with BrokerProcess.start(Path(folder) / "data") as broker:
            print(f"   ready {broker.url}")
            sent = send(broker.url)
            done = share(broker.url, sent)
            retry(broker.url)
            survive(broker, sent, done)
            title("Stop it", "ctrl-C")
            code = broker.stop()
            print(f"   it ended cleanly, with code {code}")
    title("Now yours: pulque up, then examples/first_producer.py and first_consumer.py")
    sys.exit(code)


if __name__ == "__main__":
    main()
