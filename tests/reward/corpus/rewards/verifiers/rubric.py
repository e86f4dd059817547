"""What a rubric is to those that call it: functions with weights, each given what it asks for by name."""

import asyncio
import inspect
import re


class Parser:
    def __init__(self, extract_fn=str):
        self.extract_fn = extract_fn

    def parse_answer(self, completion):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        return self.extract_fn(text)

    def get_format_reward_func(self):
        def format_reward_func(completion, **kwargs):
            return float(bool(self.parse_answer(completion)))

        return format_reward_func


class XMLParser(Parser):
    def __init__(self, fields, answer_field="answer"):
        super().__init__(lambda text: self._last(text, answer_field))
        self.fields = fields

    def _last(self, text, field):
        found = re.findall(rf"<{field}>\s*(.*?)\s*</{field}>", text, re.DOTALL)
        return found[-1] if found else None

    def get_format_reward_func(self):
        def format_reward_func(completion):
            text = completion[-1]["content"]
            return sum(self._last(text, field) is not None for field in self.fields) / len(self.fields)

        return format_reward_func


class Rubric:
    def __init__(self, funcs=None, weights=None, parser=None, parallelize_scoring=True):
        self.reward_funcs = list(funcs or [])
        self.reward_weights = list(weights or [1.0] * len(self.reward_funcs))
        self.parser = parser or Parser()
        self.class_objects = {"parser": self.parser}
        self.parallelize_scoring = parallelize_scoring

    def get_reward_funcs(self):
        return self.reward_funcs

    def get_reward_weights(self):
        return self.reward_weights

    def add_reward_func(self, func, weight=1.0):
        self.reward_funcs.append(func)
        self.reward_weights.append(weight)

    async def call_reward_func(self, func, **given):
        given |= self.class_objects
        parameters = inspect.signature(func).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            given = {name: x for name, x in given.items() if name in parameters}
        result = func(**given)
        return float(await result if inspect.isawaitable(result) else result)

    async def score_rollout(self, prompt, completion, answer, state, task="default", info=None, **kwargs):
        given = {"prompt": prompt, "completion": completion, "answer": answer, "state": state}
        given |= {"task": task, "info": info or {}} | kwargs
        values = await asyncio.gather(*(self.call_reward_func(f, **given) for f in self.get_reward_funcs()))
        total = sum(w * v for w, v in zip(self.get_reward_weights(), values))
        metrics = {f.__name__: v for f, v in zip(self.get_reward_funcs(), values)}
        return {"reward": total, "metrics": metrics}
