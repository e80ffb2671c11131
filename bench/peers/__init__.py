"""Other message queues, started and measured by the bench beside Pulque.

``python -m bench.peers`` measures them alone.
"""

from bench.peers.peer import Clients, Peer, Unavailable, batches
from bench.peers.registry import all_peers
from bench.peers.suite import Figures, Plan, measure_peer, measure_peers, work_directory
from bench.peers.table import as_markdown

__all__ = [
    "Clients",
    "Figures",
    "Peer",
    "Plan",
    "Unavailable",
    "all_peers",
    "as_markdown",
    "batches",
    "measure_peer",
    "measure_peers",
    "work_directory",
]
