"""What `make demo` shows: shared work, retries, a kill -9, delays, time travel, an audit.

    python examples/demo.py

It uses a temporary directory and a free port, cleans up, and ends by itself.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pulque
from pulque.testing.process import BrokerProcess, UpProcess

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
    title(
        "What failed comes again, each time later", "pulque pull tea.spilt --group kitchen --nack"
    )
    policy = pulque.RetryPolicy(delays=[0.2, 0.4], max_attempts=3)
    with (
        pulque.connect(url) as client,
        client.consumer("tea.spilt", "kitchen", retry=policy) as consumer,
    ):
        client.send("tea.spilt", b"one tea", key="table-4")
        failed_at = time.monotonic()
        while messages := consumer.pull(max_messages=1, timeout=3.0):
            (message,) = messages
            waited = time.monotonic() - failed_at
            print(f"   attempt {message.attempt} after {waited:.1f} s: spilt, nack")
            message.nack("spilt")
            failed_at = time.monotonic()
        title(
            "After its last attempt it is a dead letter",
            "pulque dead list tea.spilt --group kitchen",
        )
        letters = client.dead("tea.spilt", "kitchen")
        (letter,) = letters.list()
        reasons = [name for name in letter.headers if name.startswith("pulque.failed.")]
        print(
            f"   {letter.key}: {letter.body.decode()}, with the reasons of {len(reasons)} attempts"
        )
        letters.resend(letter.sequence)
        (again,) = consumer.pull(max_messages=1, timeout=5.0)
        print(f"   resent, as attempt {again.attempt}: served, ack")
        again.ack()


def travel(url: str, sent: set[str]) -> None:
    title(
        "Set the group back, and read everything again",
        "pulque group reset tea.ordered --group kitchen --to earliest --yes",
    )
    with pulque.connect(url) as client:
        (found,) = client.reset("tea.ordered", "kitchen", "earliest")
        print(f"   from {found.position:,} to {found.target:,}: {found.reread:,} to read again")
        again: set[str] = set()
        with client.consumer("tea.ordered", "kitchen") as consumer:
            while messages := consumer.pull(max_messages=1000, timeout=1.0):
                again.update(message.id for message in messages)
                consumer.ack_all(messages)
    print(f"   {len(again):,} messages came again")
    assert again == sent, "this must never happen"


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


def later(folder: Path) -> None:
    """Send two messages for later, with a delay server, and cancel one of them."""
    title(
        "Send a message for later, and another one", "pulque send tea.later 'one tea' --delay 2s"
    )
    with UpProcess.start(folder) as servers, pulque.connect(servers.url) as client:
        wanted = client.send("tea.later", b"tea for later", delay=2)
        unwanted = client.send("tea.later", b"tea for nobody", delay=2)
        print(f"   both are due at {wanted.due_at:%H:%M:%S} UTC")
        title("Cancel the other one", f"pulque delay cancel {unwanted.id}")
        fate = client.cancel(unwanted)
        got = []
        with client.consumer("tea.later", "kitchen") as consumer:
            while messages := consumer.pull(max_messages=1, timeout=10.0 if not got else 2.0):
                (message,) = messages
                late = time.time() - wanted.due_at_ms / 1000
                print(f"   {message.body.decode()!r} came {late:.2f} s after it was due")
                assert late >= 0, "this must never happen"
                message.ack()
                got.append(message.body)
        print(f"   cancelled in time: {fate.name}; the kitchen got {len(got)} of 2")
        assert got == [b"tea for later"], "this must never happen"


def archive(broker: BrokerProcess, lake: Path, sent: set[str]) -> None:
    """Keep what was sent in a table, with Spark, and ask the table."""
    title(
        "Archive the log into a lake with Spark (its start takes a while)",
        "pulque pipeline archive --lake lake --seal",
    )
    started = time.monotonic()
    run_command("pipeline", "archive", "--lake", str(lake), "--data", str(broker.data), "--seal")
    print(f"   in {time.monotonic() - started:.0f} s")
    some = min(sent)
    title("Find a message in it, without Spark", f"pulque pipeline query --lake lake --id {some}")
    found = run_command("pipeline", "query", "--lake", str(lake), "--id", some, "-o", "json")
    row = json.loads(found.splitlines()[0])
    print(f"   {row['subject']}/{row['sequence']}, stored at {row['stored_at']}")


def prove(lake: Path) -> None:
    """Compare what was sent, what is stored and what became of it; it ends here if not exact."""
    title(
        "Prove it: sent = stored = settled + dead + waiting",
        "pulque pipeline audit --lake lake",
    )
    for line in run_command("pipeline", "audit", "--lake", str(lake)).splitlines():
        print(f"   {line}")


def run_command(*arguments: str) -> str:
    """Run `pulque` as one would in a shell, and show what it says."""
    # So short a run of Spark is over before Java's better compiler pays.
    environ = {**os.environ, "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    command = [sys.executable, "-m", "pulque", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        raise SystemExit(f"pulque {' '.join(arguments)} ended with code {done.returncode}")
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="pulque-demo-") as folder:
        os.environ["PULQUE_STATE_DIR"] = f"{folder}/state"
        title("Start a broker", "pulque up")
        keep = ("--set", "storage.archive=true")  # what consumers did, until it is archived
        with BrokerProcess.start(Path(folder) / "data", arguments=keep) as broker:
            print(f"   ready {broker.url}")
            sent = send(broker.url)
            done = share(broker.url, sent)
            retry(broker.url)
            survive(broker, sent, done)
            travel(broker.url, sent)
            later(Path(folder) / "later")
            os.environ["PULQUE_URL"] = broker.url
            archive(broker, Path(folder) / "lake", sent)
            prove(Path(folder) / "lake")
            title("Stop it", "ctrl-C")
            code = broker.stop()
            print(f"   it ended cleanly, with code {code}")
    title("Now yours: pulque up, then examples/first_producer.py and first_consumer.py")
    sys.exit(code)


if __name__ == "__main__":
    main()
