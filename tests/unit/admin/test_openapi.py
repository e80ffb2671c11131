"""The API as it is published: whatever is sent to it, the server never breaks."""

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

import pulque
from pulque.admin.app import openapi
from pulque.testing.broker import InProcessBroker
from tests.unit.admin.conftest import serving
from tests.unit.admin.fakes import FakeCluster, server

EXAMPLES = 15
PATHS = openapi()["paths"]
CASES = [
    (path, method, mode)
    for path, methods in PATHS.items()
    for method, operation in methods.items()
    for mode in GenerationMode
    # What takes nothing can be asked in no wrong way.
    if mode is GenerationMode.POSITIVE or "parameters" in operation or "requestBody" in operation
]


@pytest.fixture(scope="module")
def brokers() -> Iterator[list[InProcessBroker]]:
    """Two brokers with some of everything, so that paths lead somewhere."""
    with InProcessBroker() as first, InProcessBroker() as second:
        for broker in (first, second):
            with pulque.connect(broker.url) as client:
                client.send_many("a", [b"1", b"2", b"3"])
                with client.consumer("a", "a") as consumer:
                    for message in consumer.pull(timeout=5.0):
                        message.reject("no")
        yield [first, second]


@pytest.fixture(scope="module")
def schema(brokers: list[InProcessBroker]) -> Iterator[Any]:
    """The API over a socket, in a thread of its own."""
    names = ("a", "b")
    known = {name: server(name, each.url) for name, each in zip(names, brokers, strict=True)}
    with serving(FakeCluster(known)) as url:
        yield schemathesis.openapi.from_url(f"{url}/api/v1/openapi.json")


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_nothing_that_is_sent_breaks_the_server(
    schema: Any, path: str, method: str, mode: GenerationMode, seed: int
) -> None:
    operation = schema[path][method]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def hold(case: Any) -> None:
        answer = case.call(timeout=60)
        case.validate_response(
            answer,
            checks=[not_a_server_error, status_code_conformance, response_schema_conformance],
        )

    hold()


def test_the_api_is_published_as_openapi_3_1(schema: Any) -> None:
    published = schema.raw_schema

    assert published["openapi"].startswith("3.1")
    assert all(
        path.startswith("/api/v1/") or path in {"/healthz", "/readyz"}
        for path in published["paths"]
    )
    for path, methods in published["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            assert operation["description"], (method, path)
            assert operation["responses"]["422"], (method, path)
