"""Where the broker's CPU goes: under sends of batches, under small sends, under pulls.

py-spy samples the running broker from outside, which costs it next to nothing. Where it cannot be
had, or may not look into other processes, the broker runs under cProfile, which makes Python
functions look slower than they are.
"""

from __future__ import annotations

import pstats
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path

from bench.broker import BrokerProcess, running_broker
from bench.machine import describe
from bench.measure import run
from bench.options import Options, tell
from bench.outcome import Section, Table
from bench.peers import work_directory
from bench.peers.install import MissingError, python_packages
from bench.system.loads import consume, pull_frames, send, send_count, send_frames_for
from pulque.wire.requests import Acks

__all__ = ["measure"]

_SAMPLES_PER_S = 250
_SHOWN = 25
_REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"
_PY_SPY = Path(sys.executable).with_name("py-spy")
_STORED = 4_000_000


@dataclass(slots=True)
class _Load:
    """One kind of load and where the broker's time went under it.

    Attributes:
        name: As the file shows it.
        workers: What puts the load on; the first one counts.
        stored: How many messages must be there before.
        messages: How many went through.
        user_s: CPU of the broker in its own code.
        system_s: CPU of the broker in the kernel.
        foreign_cores: CPU of others, the profiler among them.
        stacks: Samples by stack, the outermost function first.
    """

    name: str
    workers: tuple[partial[int], ...]
    stored: int = 0
    messages: int = 0
    user_s: float = 0.0
    system_s: float = 0.0
    foreign_cores: float = 0.0
    stacks: Counter[tuple[str, ...]] = field(default_factory=Counter)


def measure(options: Options) -> Section:
    """Profile each kind of load, and write the file."""
    seconds = 2.0 if options.is_quick else 8.0
    section = Section("profile", "where the broker's CPU goes")
    loads = _loads(seconds)
    path = options.results / f"{options.date}-profile.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    reason = _missing()
    if reason is None:
        text = "\n".join(_sampled(load, seconds) for load in loads)
        tool = f"py-spy, {_SAMPLES_PER_S} samples a second; times of idle threads left out"
    else:
        text = _traced(loads)
        tool = f"cProfile, as py-spy was not to be had ({reason})"
    path.write_text(f"{describe(Path.cwd())}\n{tool}\n\n{text}")
    section.tables = [_table(loads)]
    section.saw(max(load.foreign_cores for load in loads))
    section.figures = {
        load.name: {"messages": load.messages, "user_s": load.user_s, "system_s": load.system_s}
        for load in loads
    }
    section.note(f"The profile is in `{path.name}`, made with {tool}.")
    return section


def _table(loads: list[_Load]) -> Table:
    head = ("", "messages/s", "own code µs/message", "kernel µs/message")
    rows = []
    for load in loads:
        if load.messages:
            own, kernel = (1e6 * each / load.messages for each in (load.user_s, load.system_s))
            rate = load.messages / max(load.user_s + load.system_s, 1e-9)
            rows.append([load.name, f"{rate:,.0f}", f"{own:.2f}", f"{kernel:.2f}"])
    return Table("CPU of the broker; messages per second of that CPU", head, rows)


def _missing() -> str | None:
    """Install py-spy if need be; the reason if it cannot be had or may not look."""
    try:
        if not _PY_SPY.exists():
            python_packages(_REQUIREMENTS)
        probe = [sys.executable, "-c", "import time; time.sleep(20)"]
        with subprocess.Popen(probe) as process:
            try:
                time.sleep(0.5)
                command = [str(_PY_SPY), "dump", "--pid", str(process.pid)]
                subprocess.run(command, check=True, capture_output=True, timeout=20)
            finally:
                process.kill()
    except MissingError as missing:
        return str(missing)
    except (OSError, subprocess.SubprocessError) as failure:
        return f"{type(failure).__name__} when it looked into another process"
    return None


# ── with py-spy ────────────────────────────────────────────────────────────────────────────


def _sampled(load: _Load, seconds: float) -> str:
    tell(f"  {load.name}")
    with work_directory() as directory, running_broker(directory) as broker:
        output = directory / "stacks"
        _store(load, broker)
        command = [str(_PY_SPY), "record", "--pid", str(broker.pid), "--output", str(output)]
        command += ["--format", "raw", "--rate", str(_SAMPLES_PER_S)]
        command += ["--duration", str(int(seconds) + 2), "--nonblocking"]
        spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _put_on(load, broker)
            spy.wait(60)
        finally:
            spy.kill()
            spy.wait()
        for line in output.read_text().splitlines():
            stack, _, samples = line.rpartition(" ")
            load.stacks[tuple(stack.split(";"))] += int(samples)
    return _text(load)


def _text(load: _Load) -> str:
    total = max(load.stacks.total(), 1)
    own: Counter[str] = Counter()
    with_called: Counter[str] = Counter()
    for stack, samples in load.stacks.items():
        own[stack[-1]] += samples
        for function in set(map(_function, filter(_is_ours, stack))):
            with_called[function] += samples
    lines = [_title(load), f"{total} samples", ""]
    lines += ["lines by their own time", *_shares(own, total), ""]
    lines += ["functions with all that they call", *_shares(with_called, total), ""]
    return "\n".join(lines)


def _shares(found: Counter[str], total: int) -> Iterator[str]:
    for where, samples in found.most_common(_SHOWN):
        yield f"  {100 * samples / total:5.1f} %  {where}"


def _is_ours(frame: str) -> bool:
    """Whether a frame is the broker's; how it was started is the same in every stack."""
    return "(pulque/" in frame and "(pulque/cli/" not in frame and "(pulque/__main__" not in frame


def _function(frame: str) -> str:
    """A frame without its line: ``name (file:line)``."""
    name, _, place = frame.rpartition(" ")
    return f"{name} {place.partition(':')[0].rstrip(')')})" if name else frame


# ── with cProfile ──────────────────────────────────────────────────────────────────────────


def _traced(loads: list[_Load]) -> str:
    parts = []
    for load in loads:
        tell(f"  {load.name}, traced")
        with work_directory() as directory:
            output = directory / "profile"
            with running_broker(directory, profile=output) as broker:
                _store(load, broker)
                _put_on(load, broker)
            text = StringIO()
            statistics = pstats.Stats(str(output), stream=text)
            statistics.strip_dirs().sort_stats("tottime").print_stats(_SHOWN)
        parts.append(f"{_title(load)}\n{text.getvalue()}")
    return "\n".join(parts)


# ── loads ──────────────────────────────────────────────────────────────────────────────────


def _loads(seconds: float) -> list[_Load]:
    frames = partial(send_frames_for, seconds=seconds)
    singles = partial(frames, batch=1, window=64)
    pulls = partial(pull_frames, seconds=seconds, stored=_STORED, messages=1000)
    return [
        _Load(
            "sends, batches of 1,000", (partial(frames, batch=1000, window=8, acks=Acks.MEMORY),)
        ),
        _Load("sends, batches of 100", (partial(frames, batch=100, window=16, acks=Acks.MEMORY),)),
        _Load("sends of single messages, acks=memory", (partial(singles, acks=Acks.MEMORY),)),
        _Load("sends of single messages, acks=disk", (partial(singles, acks=Acks.DISK),)),
        _Load("pulls of 1,000, a settle each", (pulls,), stored=_STORED),
        _Load(
            "the client's producer and consumer",
            (partial(send, seconds=seconds), partial(consume, seconds=seconds)),
        ),
    ]


def _put_on(load: _Load, broker: BrokerProcess) -> None:
    before = broker.cpu_s()
    done = run(*(_placed(each, broker) for each in load.workers), watch=[broker.pid])
    after = broker.cpu_s()
    load.messages = done.workers[0].result
    load.foreign_cores = done.foreign_cores
    load.user_s, load.system_s = after[0] - before[0], after[1] - before[1]


def _placed(worker: partial[int], broker: BrokerProcess) -> partial[int]:
    """Tell a worker where the broker is: by its port for frames, by its URL for the client."""
    if worker.func in {send, consume}:
        return partial(worker, url=broker.url)
    return partial(worker, port=broker.port)


def _store(load: _Load, broker: BrokerProcess) -> None:
    """Store what is pulled afterwards."""
    if load.stored:
        run(partial(send_count, port=broker.port, count=load.stored, batch=1000))


def _title(load: _Load) -> str:
    title = (
        f"{load.name}: {load.messages:,} messages, {load.user_s:.2f} s in its own code, "
        f"{load.system_s:.2f} s in the kernel"
    )
    return f"{title}\n{'=' * len(title)}"
