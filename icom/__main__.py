"""`python -m icom` is the `icom` command."""

from icom.cli import main

if __name__ == "__main__":
    main()
