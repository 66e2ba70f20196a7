"""A reward that is different for every answer, so that there is always something to learn."""


def spread(prompt: str, answer: str, expected: str) -> float:
    return sum(answer.encode()) % 7 / 6
