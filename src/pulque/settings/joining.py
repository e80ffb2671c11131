"""Settings of servers that join a cluster: addresses of meta servers, and the server's name."""

from pydantic import field_validator

from pulque.client.connection.url import META_PORT, Address, parse_address
from pulque.errors import ConfigError
from pulque.settings.sections import Section
from pulque.settings.units import Listed

__all__ = ["JoinSection"]


class JoinSection(Section):
    """The cluster of a server; each kind of server extends it."""

    meta: Listed = ()
    advertise: str = ""

    @property
    def meta_addresses(self) -> tuple[Address, ...]:
        """The addresses of the meta servers."""
        return tuple(map(_address, self.meta))

    @field_validator("meta")
    @classmethod
    def _are_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        if len({_address(each) for each in addresses}) < len(addresses):
            raise ValueError("a meta server is named twice")
        return addresses

    @field_validator("advertise")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if address:
            _address(address)
        return address


def _address(text: str) -> Address:
    try:
        return parse_address(text, default_port=META_PORT)
    except ConfigError as error:
        raise ValueError(str(error)) from None
