"""An environment with the methods of verifiers that the adapter calls, written for tests."""

import asyncio
import json
from types import SimpleNamespace

TOOL = SimpleNamespace(name="add", description="Adds.", parameters={"type": "object"})


class Rubric:
    def __init__(self, has_group_rewards, log):
        self.has_group_rewards, self.log = has_group_rewards, log

    async def score_rollout(self, state):
        state["reward"] = float(state["last"] == state["answer"])

    async def score_group(self, states):
        right = [state["last"] == state["answer"] for state in states]
        for state, one in zip(states, right, strict=True):
            state["reward"] = one / sum(right)

    async def cleanup(self, state):
        if self.log:
            with open(self.log, "a") as file:
                file.write("rubric cleaned\n")


class Adder:
    def __init__(self, count, mode="", log=""):
        self.rubric, self.count, self.mode, self.log = Rubric(mode == "group", log if mode else ""), count, mode, log
        self.tool_defs = [] if mode in ("late", "inside") else [TOOL]
        # Its own rubric passes groups on to those of others, as that of an EnvGroup.
        self.envs = [Adder(count, "group")] if mode == "inside" else []

    def build_dataset(self):
        rows = [{"prompt": [{"role": "user", "content": f"{i}+1", "name": None}], "answer": str(i + 1)}
                for i in range(self.count)]  # fmt: skip
        if self.mode == "numbers":
            rows = [{**row, "answer": int(row["answer"])} for row in rows]
        if self.mode == "unasked":
            rows[1]["prompt"] = []
        return [{**row, "at": object()} for row in rows] if self.mode == "odd" else rows

    def build_eval_dataset(self):
        return None if self.mode == "no_eval" else self.build_dataset()[:1]

    async def rollout(self, row, client, model, sampling_args):
        state = {"answer": row["answer"], "error": None}
        prompt = list(row["prompt"])
        try:
            while True:
                response = (await client.get_response(prompt, model, sampling_args, [TOOL], state=state)).message
                if response.content == "fail":
                    state["error"] = RuntimeError("the sandbox is gone")
                calls = getattr(response, "tool_calls", None)
                if not calls:
                    state["last"] = response.content
                    return state
                prompt += [{"role": "assistant", "content": response.content, "tool_calls": calls}]
                for call in calls:
                    await asyncio.sleep(0)
                    total = str(sum(json.loads(call["arguments"]).values()))
                    prompt.append({"role": "tool", "content": total, "tool_call_id": call["id"]})
                if response.content == "forget":
                    prompt = prompt[1:]
        finally:
            if self.log:
                with open(self.log, "a") as file:
                    file.write("cleaned\n")


def load_environment(count=3, **options):
    return {} if options.get("mode") == "other" else Adder(count, **options)
