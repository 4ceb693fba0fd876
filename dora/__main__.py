"""`python -m dora` is the command `dora`; processes of a run are started this way."""

from dora.cli.main import main

if __name__ == "__main__":
    main()
