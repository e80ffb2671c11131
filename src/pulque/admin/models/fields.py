"""Kinds of fields that many requests and answers have."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["MAX_PARTITIONS", "Body", "Flag", "Mode", "Sequence", "Switchable", "Tag"]

_LARGEST = 2**63 - 1
MAX_PARTITIONS = 1024
Mode = Literal["shared", "broadcast", "once", "ordered"]
Switchable = Literal["shared", "once", "ordered"]
Sequence = Annotated[int, Field(strict=True, ge=0, le=_LARGEST)]
Tag = Annotated[str, Field(min_length=1, max_length=255)]
Flag = Annotated[bool, Field(strict=True)]


class Body(BaseModel):
    """What a client sends: nothing in it that is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True)
