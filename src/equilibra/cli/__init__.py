"""The command line: a file per command, or per two that belong together."""
