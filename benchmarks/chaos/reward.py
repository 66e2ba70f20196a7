"""The reward of the runs, in a file without imports: every rank's scorer starts from it."""


def spread(prompt: str, answer: str, expected: str) -> float:  # noqa: ARG001
    """A reward that differs between answers, so that there is something to learn."""
    return sum(answer.encode()) % 7 / 6
