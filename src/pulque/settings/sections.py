"""Settings that all servers share."""

from ipaddress import ip_address
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from pulque.settings.units import KIB, MIB, Number, Size, show_size

__all__ = ["BatchLimitsSection", "ListenSection", "LogSection", "Section", "ServerSettings"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ListenSection(Section):
    """The address of a server."""

    host: str = Field(
        default="127.0.0.1",
        description="The address to listen on. It has to be a loopback address (127.0.0.1, ::1 or "
        "localhost): clients are not authenticated yet, so nobody else may reach the port.",
    )
    port: Annotated[Number, Field(ge=0, le=65535)] = Field(
        default=7450,
        description="The TCP port. 0 takes any free one; the ready line tells which.",
    )

    @field_validator("host")
    @classmethod
    def _is_loopback(cls, host: str) -> str:
        if host == "localhost":
            return host
        try:
            is_loopback = ip_address(host).is_loopback
        except ValueError:
            raise ValueError("not an address; use 127.0.0.1, ::1 or localhost") from None
        if not is_loopback:
            raise ValueError(
                "not a loopback address, and whoever can reach the port could read and send: "
                "authentication does not exist yet; use 127.0.0.1, ::1 or localhost"
            )
        return host


class BatchLimitsSection(Section):
    """How large messages and batches may be, at a server that stores them."""

    max_message: Annotated[Size, Field(ge=KIB, le=16 * MIB)] = Field(
        default=ByteSize(4 * MIB),
        description="The largest message: key, tags, headers and body together.",
    )
    max_batch: Annotated[Size, Field(ge=KIB, le=16 * MIB)] = Field(
        default=ByteSize(16 * MIB), description="The largest batch, as it travels."
    )
    open_records: bool = False
    max_connections: Annotated[Number, Field(ge=1, le=1_000_000)] = Field(
        default=10_000, description="Clients at one time; one more is refused."
    )

    @model_validator(mode="after")
    def _fit_into_batches(self) -> Self:
        if self.max_message > self.max_batch:
            raise ValueError(
                f"max_message ({show_size(self.max_message)}) is over "
                f"max_batch ({show_size(self.max_batch)}): such a message would fit into no batch"
            )
        return self


class LogSection(Section):
    """Logging to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lines below this level are left out."
    )
    format: Literal["auto", "text", "json"] = Field(
        default="auto",
        description="`text` is key=value for people, `json` one object per line for machines; "
        "`auto` is `text` on a terminal and `json` elsewhere.",
    )


class ServerSettings(Section):
    """The settings of a server."""

    server: ClassVar[str]
    """The server's word in its environment variables, ``PULQUE_<server>__…``."""
