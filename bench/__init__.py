"""How fast Pulque is: beside other queues, and beside what the machine can do.

``python -m bench`` (or ``make bench``) measures everything and writes ``bench/results``.
"""
