"""`python -m shoal`: the command line, where the command `shoal` is not on the PATH."""

from shoal.cli.entry_point import main

if __name__ == "__main__":
    main()
