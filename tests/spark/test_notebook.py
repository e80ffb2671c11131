"""The notebook runs from its first cell to its last, and shows what it promises."""

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "spark.ipynb"


def printed(cell: Any) -> str:
    outputs = [each for each in cell.get("outputs", []) if each.output_type == "stream"]
    return "".join(each.text for each in outputs if each.name == "stdout")


def test_the_notebook_is_kept_without_what_it_printed() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells

    for cell in cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.server
@pytest.mark.timeout(400)
def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    text = "\n".join(map(printed, notebook.cells))

    assert "|order.paid|  100|" in text
    assert "|order.sent|4950.0|" in text
    assert "100 orders, then 120" in text
    # A table is what was stored when it was first read.
    assert "order.paid 100" in text
