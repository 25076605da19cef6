"""`python -m kvcompile`: the command line, where its script is not installed."""

from kvcompile.cli import app

if __name__ == "__main__":
    app(prog_name="kvcompile")
