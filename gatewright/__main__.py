"""`python -m gatewright`: the command line."""

from gatewright.cli import main

if __name__ == "__main__":
    main()
