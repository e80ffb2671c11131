"""Write the files of one version of the formats: ``python -m tests.compat.generate v1``.

They are written once, by the first release that has the version, and never again: a file that
is there is refused. Code that cannot read them any more is wrong, not the files.
"""

import sys
from pathlib import Path

from tests.compat.samples import encoded

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m tests.compat.generate v1", file=sys.stderr)
        return 2
    folder = Path(__file__).parent / arguments[0]
    folder.mkdir(exist_ok=True)
    written = 0
    for name, data in encoded().items():
        try:
            with (folder / f"{name}.bin").open("xb") as file:
                written += file.write(data)
        except FileExistsError:
            print(f"{folder.name}/{name}.bin is there, and stays as it is", file=sys.stderr)
    print(f"{written} bytes written to {folder.name}")
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
