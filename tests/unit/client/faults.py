"""Faults for the fake broker."""

from pulque.wire import requests


class Times:
    """A fault that happens to the first requests of a kind, and not to the later ones."""

    def __init__(self, kind: type[requests.Request], fault: Exception, times: int = 1) -> None:
        self.kind = kind
        self.fault = fault
        self.times = times

    def __call__(self, request: requests.Request) -> None:
        if isinstance(request, self.kind) and self.times:
            self.times -= 1
            raise self.fault
