"""The command line. It needs typer and rich, the extra ``cli``; nothing else of the package imports it."""
