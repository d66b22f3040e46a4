"""Environments of the package verifiers, one inside the other, whose rubric compares the rollouts of a group."""


def load_environment():
    import verifiers as vf
    from datasets import Dataset

    def longest(completions) -> list[float]:
        lengths = [len(completion[-1]["content"]) for completion in completions]
        return [float(length == max(lengths)) for length in lengths]

    def begins(completion, answer):
        return float(completion[-1]["content"][:1] == answer)

    def rows(start):
        return Dataset.from_list(
            [{"question": f"{a}>{b}", "answer": "a"} for a in range(start, 9, 2) for b in range(9)]
        )

    rubric = vf.Rubric(funcs=[longest, begins], weights=[1.0, 0.25])
    return vf.EnvGroup([vf.SingleTurnEnv(dataset=rows(0), eval_dataset=rows(1), rubric=rubric)])
