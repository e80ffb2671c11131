"""``python -m pulque`` is the command ``pulque``."""

from pulque.cli.main import main

if __name__ == "__main__":
    main()
