"""The settings of a meta server: read once, never changed, every one explained."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from pulque.errors import ConfigError
from pulque.meta.database.connection import parse_database_url
from pulque.settings.names import OwnName, Patterns
from pulque.settings.sections import ListenSection, LogSection, Section, ServerSettings
from pulque.settings.units import DAY, HOUR, MILLISECOND, MINUTE, SECOND, Duration, Number

__all__ = [
    "AdminSection",
    "DatabaseSection",
    "MetaClusterSection",
    "MetaLimitsSection",
    "MetaListenSection",
    "MetaReplicationSection",
    "MetaSettings",
    "MetaStorageSection",
    "SubjectsSection",
]

DEFAULT_PORT = 7440
SQLITE_FILE = "meta.sqlite"


class MetaListenSection(ListenSection):
    """Where the meta server can be reached."""

    port: Annotated[Number, Field(ge=0, le=65535)] = Field(
        default=DEFAULT_PORT,
        description="The TCP port. 0 takes any free one; the ready line tells which.",
    )


class MetaStorageSection(Section):
    """Where the meta server keeps what it knows."""

    directory: Path | None = Field(
        default=None,
        description="Holds `meta.sqlite`; made if it is not there. If `database.url` names "
        "another database, it holds what was known last instead, so that the meta server can be "
        "started while that is away. One of the two has to be given.",
    )


class DatabaseSection(Section):
    """Where the cluster is written down."""

    url: str = Field(
        default="",
        description="The database: `postgresql://user@host:5432/name`, which several meta "
        "servers may share, or `sqlite:///file`. Empty for a SQLite file in `storage.directory`. "
        "It holds no password.",
    )
    password: SecretStr | None = Field(
        default=None,
        description="The password for it, best given as `PULQUE_META__DATABASE__PASSWORD`. It is "
        "never shown or logged.",
    )
    password_file: Path | None = Field(
        default=None,
        description="A file with nothing but the password in it, as systemd and containers give "
        "secrets. It comes before `database.password`.",
    )
    timeout: Annotated[Duration, Field(ge=10 * MILLISECOND, le=MINUTE)] = Field(
        default=2 * SECOND,
        description="A transaction that takes longer is given up, and the database counts as "
        "away.",
    )
    refresh: Annotated[Duration, Field(ge=10 * MILLISECOND, le=MINUTE)] = Field(
        default=SECOND,
        description="How often to look for what other meta servers wrote.",
    )

    @field_validator("url")
    @classmethod
    def _is_a_database(cls, url: str) -> str:
        if url:
            try:
                parse_database_url(url)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return url

    def read_password(self) -> str | None:
        """Return the password, if there is one.

        Raises:
            ConfigError: The file cannot be read.
        """
        if self.password_file is None:
            return self.password.get_secret_value() if self.password else None
        try:
            return self.password_file.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"database.password_file {self.password_file} cannot be read: {error}"
            ) from None


class MetaClusterSection(Section):
    """How the servers of the cluster are watched over."""

    heartbeat: Annotated[Duration, Field(ge=50 * MILLISECOND, le=HOUR)] = Field(
        default=5 * SECOND,
        description="How often brokers and delay servers say that they live. One that misses "
        "three leaves the routes until it is heard again.",
    )
    clock_tolerance: Annotated[Duration, Field(ge=MILLISECOND, le=DAY)] = Field(
        default=10 * SECOND,
        description="A server whose clock is further from the meta server's is warned about.",
    )


class MetaReplicationSection(Section):
    """How broker groups that have followers are led."""

    lease: Annotated[Duration, Field(ge=200 * MILLISECOND, le=HOUR)] = Field(
        default=5 * SECOND,
        description="A leader that no meta server heard of for so long is replaced by one of "
        "those that have all that was confirmed. It stops by itself a little before. The same "
        "on all meta servers.",
    )


class AdminSection(Section):
    """Where the administration API can be reached, over HTTP."""

    enabled: bool = Field(default=True, description="Whether there is one at this meta server.")
    port: Annotated[Number, Field(ge=0, le=65535)] | None = Field(
        default=None,
        description="Its TCP port, on the address of `listen.host`; 0 takes any free one. Without "
        "it, 40 above `listen.port`, which is 7480; if that is taken, any free one. The log and "
        "`pulque status` tell which.",
    )


class SubjectsSection(Section):
    """Which subjects there may be, and where they go."""

    create: Literal["first-send", "beforehand"] = Field(
        default="first-send",
        description="`first-send`: a subject that does not exist is created when somebody wants "
        "to send to it. `beforehand`: only by command, and sends to others are refused.",
    )
    allowed: Patterns = Field(
        default=(),
        description="Only these subjects, and those that patterns like `order.*` cover, may be "
        "created. Empty allows all.",
    )
    spread: Annotated[Number, Field(ge=1, le=64)] = Field(
        default=2,
        description="On how many broker groups a new subject is placed; on all there are, if "
        "fewer.",
    )


class OrderedSection(Section):
    """How partitions are allotted to the consumers of ordered groups."""

    exclusive: bool = Field(
        default=True,
        description="Whether each partition belongs to one consumer of an ordered group. Without "
        "that, consumers that ask for order are told that they have none.",
    )
    timeout: Annotated[Duration, Field(ge=300 * MILLISECOND, le=HOUR)] = Field(
        default=10 * SECOND,
        description="A consumer that is silent for this long counts as gone, and its partitions "
        "go to others; it is also how long a consumer may go on without a word from here.",
    )
    drain_check: Annotated[Duration, Field(ge=20 * MILLISECOND, le=MINUTE)] = Field(
        default=500 * MILLISECOND,
        description="How often brokers are asked whether a partition that was split or merged is "
        "empty for a group: then those that follow it are consumed.",
    )


class MetaLimitsSection(Section):
    """How much one client, and all of them, may ask of the meta server."""

    max_connections: Annotated[Number, Field(ge=1, le=1_000_000)] = Field(
        default=50_000, description="Clients and servers at one time; one more is refused."
    )
    max_subjects: Annotated[Number, Field(ge=1, le=10_000_000)] = Field(
        default=100_000,
        description="The most subjects (0.6 KiB of memory each); one more is refused.",
    )
    max_watched: Annotated[Number, Field(ge=1, le=65_535)] = Field(
        default=10_000, description="The most routes that one client may watch."
    )
    handshake_timeout: Annotated[Duration, Field(ge=10 * MILLISECOND, le=HOUR)] = Field(
        default=5 * SECOND,
        description="A new connection has to say who it is within this time.",
    )
    idle_timeout: Annotated[Duration, Field(ge=10 * MILLISECOND, le=DAY)] = Field(
        default=2 * MINUTE,
        description="A connection without a request, and without one waiting for its answer, is "
        "closed after this time.",
    )


class MetaSettings(ServerSettings):
    """All that a meta server can be told."""

    server = "meta"

    name: OwnName = Field(
        default="meta", description="What this meta server calls itself; spelled like a subject."
    )
    listen: MetaListenSection = Field(
        default=MetaListenSection(), description="Where the meta server can be reached."
    )
    storage: MetaStorageSection = Field(
        default=MetaStorageSection(),
        description="Where the meta server keeps what it knows.",
    )
    database: DatabaseSection = Field(
        default=DatabaseSection(), description="Where the cluster is written down."
    )
    cluster: MetaClusterSection = Field(
        default=MetaClusterSection(),
        description="How the servers of the cluster are watched over.",
    )
    replication: MetaReplicationSection = Field(
        default=MetaReplicationSection(),
        description="How broker groups that have followers are led.",
    )
    subjects: SubjectsSection = Field(
        default=SubjectsSection(), description="Which subjects there may be, and where they go."
    )
    ordered: OrderedSection = Field(
        default=OrderedSection(),
        description="How partitions are allotted to the consumers of ordered groups.",
    )
    admin: AdminSection = Field(
        default=AdminSection(),
        description="Where the administration API can be reached, over HTTP.",
    )
    limits: MetaLimitsSection = Field(
        default=MetaLimitsSection(),
        description="How much one client, and all of them, may ask of the meta server.",
    )
    log: LogSection = Field(
        default=LogSection(), description="What the meta server says about itself, on stderr."
    )

    @model_validator(mode="after")
    def _has_a_place(self) -> "MetaSettings":
        if not self.database.url and self.storage.directory is None:
            raise ValueError(
                "storage.directory is missing, and so is database.url: one of them says where "
                "the cluster is written down"
            )
        return self

    def database_url(self) -> str:
        """Return where the cluster is written down."""
        if self.database.url or self.storage.directory is None:
            return self.database.url
        return f"sqlite:///{self.storage.directory.absolute() / SQLITE_FILE}"
