"""`python -m icom` is the `icom` command."""

from icom.cli import program

if __name__ == "__main__":
    program()
