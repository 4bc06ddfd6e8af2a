"""The one exception that a user is meant to read."""


class EdgelinError(Exception):
    """Bad input or a failed check, told in one line: what was given, what is allowed, what next.

    The command line prints the message without a traceback and exits with 1.
    """
