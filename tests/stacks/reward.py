"""A reward that a random model can learn in a dozen steps: how much of the answer is lower-case letters."""


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None, **_: object) -> float:
    return sum(letter.islower() for letter in solution_str) / max(len(solution_str), 1)
