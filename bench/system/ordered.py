"""What order costs: throughput beside an unordered group, pauses of hand-overs, a slow key."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pulque
from bench.broker import BrokerProcess, running_broker
from bench.measure import Gate, Run, median_run, percentile, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory

__all__ = ["consume_until_killed", "measure"]

_KEYS = 10_000
_LOCK_S = 2.0
_AT_ONCE = 64
_TASK_S = 0.02
"""Long enough for this machine to have that many in flight: it is not to be measured here."""
_SLOW_S = 40 * _TASK_S
_VICTIM = (
    "import sys; from bench.system.ordered import consume_until_killed; "
    "consume_until_killed(*sys.argv[1:])"
)
_SETTINGS = {"consumption.lock": f"{_LOCK_S:g}s", "consumption.strict": "bench.*"}


def measure(options: Options) -> Section:
    """Compare rates, hand partitions over, and let one key be slow."""
    count = 50_000 if options.is_quick else 300_000
    section = Section("ordered", f"{count:,} messages of 100 B, {_KEYS:,} order keys")
    with work_directory() as directory, running_broker(directory, settings=_SETTINGS) as broker:
        _compare(section, broker, count, options.repeats)
        _hand_over(section, broker, 5 if options.is_quick else 20)
        _kill(section, broker, 1 if options.is_quick else 3)
        _slow_key(section, broker, 2_000 if options.is_quick else 6_000, options.repeats)
    return section


# ── throughput ─────────────────────────────────────────────────────────────────────────────


def _compare(section: Section, broker: BrokerProcess, count: int, repeats: int) -> None:
    ways = {
        "no order key, shared group": (False, False),
        "order keys, shared group": (True, False),
        "order keys, ordered group": (True, True),
    }
    numbers = iter(range(1000))
    all_runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(repeats):  # in turns: what else the machine does disturbs all alike
        for name, (has_keys, is_ordered) in ways.items():
            found = _flow(broker, numbers, count, has_keys=has_keys, is_ordered=is_ordered)
            all_runs[name].append(found)
    runs = {name: median_run(found) for name, found in all_runs.items()}
    for name, found in runs.items():
        section.saw(found.foreign_cores)
        tell(f"  {name}: {count / found.wall_s:,.0f}/s")
    rates = {name: count / found.wall_s for name, found in runs.items()}
    plain, keyed, ordered = rates.values()
    section.aims.append(
        Aim(
            f"ordered throughput, {_KEYS:,} keys, of the unordered",
            ordered / plain,
            0.5,
            is_least=True,
            unit="x",
            detail=f"{ordered:,.0f}/s and {plain:,.0f}/s; {keyed:,.0f}/s with keys, unordered",
        )
    )
    rows = [
        [
            name,
            f"{count / found.wall_s:,.0f}",
            f"{1e6 * found.workers[0].cpu_s / count:.2f}",
            f"{1e6 * found.workers[1].cpu_s / count:.2f}",
            f"{1e6 * found.watched_cpu_s / count:.2f}",
        ]
        for name, found in runs.items()
    ]
    head = ("way", "messages/s", "producer µs", "consumer µs", "broker µs")
    section.tables.append(Table("CPU per message", head, rows))
    section.figures["rates"] = rates


def _flow(
    broker: BrokerProcess, numbers: Iterator[int], count: int, *, has_keys: bool, is_ordered: bool
) -> Run:
    # Only what is ordered pays for the strict order.
    subject = f"{'bench' if has_keys else 'plain'}.rate{next(numbers)}"
    return run(
        partial(_send, url=broker.url, subject=subject, count=count, has_keys=has_keys),
        partial(_consume, url=broker.url, subject=subject, count=count, is_ordered=is_ordered),
        watch=[broker.pid],
    )


def _send(gate: Gate, *, url: str, subject: str, count: int, has_keys: bool) -> None:
    body = bytes(100)
    keys = [f"key {number}" for number in range(_KEYS)]
    with pulque.connect(url, acks="memory") as client, client.producer() as producer:
        gate()
        if has_keys:
            for number in range(count):
                producer.send(subject, body, order_key=keys[number % _KEYS])
        else:
            for _ in range(count):
                producer.send(subject, body)
        producer.flush()


def _consume(gate: Gate, *, url: str, subject: str, count: int, is_ordered: bool) -> None:
    with (
        pulque.connect(url) as client,
        client.consumer(subject, "rate", ordered=is_ordered, consumer_id="bench") as consumer,
    ):
        gate()
        for number, message in enumerate(consumer, 1):
            message.ack()
            if number == count:
                consumer.settle()
                return


# ── hand-over ──────────────────────────────────────────────────────────────────────────────


def _hand_over(section: Section, broker: BrokerProcess, times: int) -> None:
    done = run(partial(_close_and_go_on, url=broker.url, times=times))
    pauses: list[float] = done.workers[0].result
    section.aims.append(
        Aim(
            "hand-over pause after a clean stop, p99",
            percentile(pauses, 99),
            2.0,
            is_least=False,
            unit="s",
            detail=f"{times} times, median {percentile(pauses, 50):.3f} s",
        )
    )
    section.figures["pauses_s"] = pauses
    section.saw(done.foreign_cores)
    tell(f"  hand-over: p50 {percentile(pauses, 50):.3f} s, p99 {percentile(pauses, 99):.3f} s")


def _close_and_go_on(gate: Gate, *, url: str, times: int) -> list[float]:
    """Close one consumer again and again while messages flow, and let the next one go on."""
    stop = threading.Event()
    pauses = []
    with pulque.connect(url, acks="memory") as client:
        sender = threading.Thread(target=_send_steadily, args=(client, "bench.over", stop))
        consumer = _ordered(client, "bench.over", "over-0")
        gate()
        sender.start()
        for number in range(times):
            _take(consumer, 50)
            following = _ordered(client, "bench.over", f"over-{number + 1}")
            following.pull(1, timeout=0.2)  # it is there, and has nothing yet
            last = _take(consumer, 20)
            consumer.close()
            consumer = following
            pauses.append(_take(consumer, 1) - last)
        stop.set()
        sender.join()
        consumer.close()
    return pauses


def _kill(section: Section, broker: BrokerProcess, times: int) -> None:
    done = run(partial(_kill_and_go_on, url=broker.url, times=times), limit_s=60.0 * times + 60)
    pauses: list[float] = done.workers[0].result
    lease = 10.0
    section.aims.append(
        Aim(
            f"hand-over pause after kill -9 (silence of {lease:g} s), worst",
            max(pauses),
            lease + 2.0,
            is_least=False,
            unit="s",
            detail=f"{times} times",
        )
    )
    section.figures["kill_pauses_s"] = pauses
    tell(f"  hand-over after a kill: {max(pauses):.2f} s")


def _kill_and_go_on(gate: Gate, *, url: str, times: int) -> list[float]:
    stop = threading.Event()
    pauses = []
    with pulque.connect(url, acks="memory") as client:
        sender = threading.Thread(target=_send_steadily, args=(client, "bench.kill", stop))
        gate()
        sender.start()
        for number in range(times):
            first = subprocess.Popen([sys.executable, "-c", _VICTIM, url, f"k{number}"], stdout=-1)
            if first.stdout is None or not first.stdout.readline():
                raise BenchFailedError("the first consumer got nothing")
            following = _ordered(client, "bench.kill", f"then{number}")
            following.pull(1, timeout=0.2)
            first.kill()
            last = time.monotonic()
            first.wait()
            pauses.append(_take(following, 1) - last)
            following.close()
        stop.set()
        sender.join()
    return pauses


def consume_until_killed(url: str, name: str) -> None:
    """Consume, and say when that is going well."""
    with pulque.connect(url) as client:
        consumer = _ordered(client, "bench.kill", name)
        _take(consumer, 20)
        print("going", flush=True)
        _take(consumer, 10_000_000)


def _ordered(client: pulque.Client, subject: str, name: str) -> pulque.Consumer:
    return client.consumer(subject, "over", ordered=True, consumer_id=name, start="earliest")


def _send_steadily(client: pulque.Client, subject: str, stop: threading.Event) -> None:
    with client.producer() as producer:
        number = 0
        while not stop.wait(0.002):
            producer.send(subject, b"x", order_key=f"key {number % 100}")
            number += 1


def _take(consumer: pulque.Consumer, count: int) -> float:
    """Handle so many messages; return when the last one came."""
    deadline = time.monotonic() + 60
    while count > 0 and time.monotonic() < deadline:
        for message in consumer.pull(min(count, 20), timeout=1.0):
            message.ack()
            count -= 1
    if count > 0:
        raise BenchFailedError("no messages came for a minute")
    return time.monotonic()


# ── a slow key ─────────────────────────────────────────────────────────────────────────────


def _slow_key(section: Section, broker: BrokerProcess, tasks: int, repeats: int) -> None:
    found: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(repeats):
        for name, rates_seen in found.items():
            subject = f"bench.slow{number}.{name}"
            is_slow = name == "with"
            done = run(
                partial(_work, url=broker.url, subject=subject, tasks=tasks, is_slow=is_slow)
            )
            rates_seen.append(float(done.workers[0].result))
            section.saw(done.foreign_cores)
    rates = {name: percentile(seen, 50) for name, seen in found.items()}
    for name, rate in rates.items():
        tell(f"  {name} a slow key: {rate:,.0f}/s of the others")
    section.aims.append(
        Aim(
            f"the rate of {_AT_ONCE} keys in flight beside a slow one, of that without it",
            rates["with"] / rates["without"],
            0.8,
            is_least=True,
            unit="x",
            detail=f"{rates['with']:,.0f}/s and {rates['without']:,.0f}/s",
        )
    )
    section.figures["slow_key"] = rates


def _work(gate: Gate, *, url: str, subject: str, tasks: int, is_slow: bool) -> float:
    """Return how many messages of the usual keys are handled in a second."""
    keys = 8 * _AT_ONCE
    with pulque.connect(url, acks="memory") as client:
        with client.producer() as producer:
            for number in range(tasks):
                producer.send(subject, b"x", order_key=f"key {number % keys}")
        gate()
        began = time.monotonic()
        usual, ends = 0, 0.0
        with (
            client.consumer(subject, "slow", ordered=True, consumer_id="bench") as consumer,
            ThreadPoolExecutor(_AT_ONCE) as pool,
        ):
            running: deque[object] = deque()
            room = threading.Semaphore(_AT_ONCE)

            def handle(message: pulque.ReceivedMessage) -> None:
                is_it = is_slow and message.order_key == "key 0"
                time.sleep(_SLOW_S if is_it else _TASK_S)
                message.ack()
                room.release()

            expected = tasks - (tasks + keys - 1) // keys
            while usual < expected:
                room.acquire()
                room.release()
                for message in consumer.pull(_AT_ONCE, timeout=5.0):
                    room.acquire()
                    usual += message.order_key != "key 0"
                    running.append(pool.submit(handle, message))
            ends = time.monotonic()
    return expected / (ends - began)
