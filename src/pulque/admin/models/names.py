"""Names in requests: checked as they come in, by the rules that hold everywhere."""

from typing import Annotated

from fastapi import Path, Query
from pydantic import AfterValidator, StringConstraints, WithJsonSchema

from pulque.errors import InvalidNameError
from pulque.model.names import (
    MAX_NAME_LENGTH,
    Group,
    PartitionName,
    Pattern,
    Subject,
    parse_group,
    parse_owner,
    parse_partition,
    parse_pattern,
    parse_subject,
)

__all__ = [
    "GroupInPath",
    "GroupInQuery",
    "GroupName",
    "PartitionField",
    "PatternInPath",
    "PatternInQuery",
    "PatternName",
    "PlainGroupInPath",
    "ServerInPath",
    "ServerName",
    "SubjectInPath",
    "SubjectName",
    "WrongNameError",
]

_PLAIN = r"^[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9_])?$"
_PATTERN = r"^(?:\*|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?(?:\.\*)?)$"
_OWNER = r"^#?[A-Za-z0-9](?:[A-Za-z0-9._@:/-]{0,253}[A-Za-z0-9_])?$"


class WrongNameError(ValueError):
    """A name is not allowed: what pydantic takes for a refusal, unlike ``InvalidNameError``."""


def _subject(text: str) -> Subject:
    try:
        return parse_subject(text)
    except InvalidNameError as error:
        raise WrongNameError(str(error)) from None


def _pattern(text: str) -> Pattern:
    try:
        return parse_pattern(text)
    except InvalidNameError as error:
        raise WrongNameError(str(error)) from None


def _group(text: str) -> Group:
    try:
        return parse_group(text)
    except InvalidNameError as error:
        raise WrongNameError(str(error)) from None


def _owner(text: str) -> Group:
    try:
        return parse_owner(text)
    except InvalidNameError as error:
        raise WrongNameError(str(error)) from None


def _partition(text: str) -> PartitionName:
    try:
        return parse_partition(text)
    except InvalidNameError as error:
        raise WrongNameError(str(error)) from None


def _shape(pattern: str) -> WithJsonSchema:
    """Have the published API tell programs the rule that the validator tells people in words."""
    return WithJsonSchema(
        {"type": "string", "minLength": 1, "maxLength": MAX_NAME_LENGTH, "pattern": pattern}
    )


_Plain, _Covering, _Owning = map(_shape, (_PLAIN, _PATTERN, _OWNER))

SubjectName = Annotated[str, AfterValidator(_subject), _Plain]
PatternName = Annotated[str, AfterValidator(_pattern), _Covering]
GroupName = Annotated[str, AfterValidator(_group), _Plain]
OwnerName = Annotated[str, AfterValidator(_owner), _Owning]
ServerName = Annotated[str, AfterValidator(_group), _Plain]
PartitionField = Annotated[
    str, StringConstraints(min_length=1, max_length=1000), AfterValidator(_partition)
]

SubjectInPath = Annotated[SubjectName, Path(description="A subject.")]
PatternInPath = Annotated[PatternName, Path(description="A subject, or a pattern: `order.*`.")]
GroupInPath = Annotated[
    OwnerName, Path(description="A group; of a broadcast consumer `#` and its id.")
]
PlainGroupInPath = Annotated[GroupName, Path(description="A group.")]
ServerInPath = Annotated[ServerName, Path(description="The name of a broker.")]
PatternInQuery = Annotated[
    PatternName | None, Query(description="Only of this subject, or of a pattern: `order.*`.")
]
GroupInQuery = Annotated[OwnerName | None, Query(description="Only this group.")]
