"""The command ``gradsurgery``, also as ``python -m gradsurgery``."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        import rich
        import typer  # noqa: F401 - both are what the extra installs
    except ImportError as error:
        sys.stderr.write(
            f"the command line was asked for, and {error.name} is not installed. "
            'Install it with python -m pip install "gradsurgery[cli]".\n'
        )
        raise SystemExit(2) from None
    del rich
    from .cli.app import app

    app(prog_name="gradsurgery")


if __name__ == "__main__":
    main()
