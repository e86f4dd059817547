"""What each reward of the corpus says of right, wrong and malformed responses, worked out by hand.

A case is judged like a rollout: for each of its rows one group of responses. The first three responses of the
first row are a right one, a wrong one and one that cannot be read (of a reward for a form: in the form, not
quite, not at all); the rest show what is peculiar to the function.
"""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """One function of the corpus, and what it has to say."""

    system: str
    spec: str  # as on a command line, FILE relative to the corpus
    name: str  # of its part in the logs
    rows: list[dict[str, Any]]  # in the schema of that system
    responses: list[list[str]]  # for each row
    values: list[list[float | None]]  # None: not applicable
    needs: str = ""  # what the machine has to have; "" for nothing
    why: str = ""  # what the error says where it is not there
    beside: tuple[str, ...] = ()  # further rewards, for rows to which this one does not apply
    metrics: tuple[str, ...] = ()  # names of further numbers that it reports


def chat(question: str) -> list[dict[str, str]]:
    """A conversation of a system prompt and a question."""
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]


# ----------------------------------------------------------------------------- rows, in each system's schema

SUM = {"prompt": chat("What is 1/2 + 1/4?"), "solution": r"$\frac{3}{4}$"}
PROOF = {"prompt": chat("Prove it."), "solution": "left to the reader"}
DIGITS = {"prompt": chat("sort:3123="), "solution": "1233"}
CLIPS = {"prompt": chat("How many clips?"), "answer": "72"}
CPP = {"prompt": chat("Write C++."), "language": "cpp"}
ADD = {"prompt": chat("Add two numbers."), "official_tests": [
    {"input": "2 3", "output": "5"}, {"input": "10 -4", "output": "6"}]}  # fmt: skip
SNIPPET = {"prompt": chat("Add."), "verification_info": {"language": "python", "test_cases": []}}
PLAIN = {"prompt": "How many clips? ", "ground_truth": "72"}
CAPTION = {"prompt": "<image>How many clips?", "answer": "72"}
TASKS = [{"prompt": "20 + 22 =", "task": "math"}, {"prompt": "Write a function that adds.", "task": "code"}]


def verl(source: str = "openai/gsm8k", truth: Any = "72", question: str = "How many?") -> dict[str, Any]:
    """A row of a parquet file as verl prepares it."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0, "question": "How many?", "answer": "72"},
    }


COUNTDOWN = verl("countdown", {"target": 24, "numbers": [3, 8]}, "Make 24 of 3 and 8.")
PRODUCT = verl("multiply", "391", "User: What is 17 * 23?\nAssistant: Let me see.")
REVERSE = {"prompt": chat("Reverse abc."), "answer": "cba", "task": "reverse"}
CALLS = {"prompt": chat("Add 1."), "info": {"max_characters": 70},
         "answer": '[{"name": "add", "arguments": {"a": 1}}]'}  # fmt: skip
LABELLED = {"input": "How many clips? ", "label": "72"}
RULED = {"prompt": chat("How many clips?"), "label": "gsm8k_rule", "reference": "72"}
PAIRED = {"prompt": chat("Which is better?"), "label": "general", "reference": {"preference": "A"}}

# ------------------------------------------------------------------------------------------------ responses

# of the sum, 19 characters each but the last: 38
BOXED = [r"\boxed{\frac{3}{4}}", r"\boxed{\frac{2}{3}}", "?" * 38]
TAGGED = "<think>\na\n</think>\n<answer>\n3\n</answer>"
XML = "<reasoning>\na\n</reasoning>\n<answer>\n{}\n</answer>\n"
WORKED = "a<end_working_out><SOLUTION>{}</SOLUTION>"
CODE = "<think>\na\n</think>\n<answer>\n```{}\n1;\n```\n</answer>"
ADDS = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
BOXES = [r"\boxed{72}", r"\boxed{71}", "seventy-two"]
THOUGHT = [rf"<think>a</think> {BOXES[0]}", rf"<think>a</think> {BOXES[1]}", "72"]
CHOICE = "<think>a</think><answer>{}</answer>"
CALL = '<tool>[{{"name": "{}", "arguments": {{"a": 1}}}}]</tool>'

R1, TRL, CUSTOM = "open_r1/rewards.py", "trl/rewards", "trl/custom.py"
DEMO, NOTEBOOK, VISION = "demo/grpo_demo.py", "unsloth/qwen3_grpo.py", "unsloth/vision.py"
SCORE, E2B = "verl/reward_score", "the package e2b-code-interpreter and a key of E2B"

OPEN_R1 = [
    Case("open-r1", f"{R1}:accuracy_reward", "accuracy_reward", [SUM, PROOF], [BOXED, BOXED],
         [[1, 0, 0], [None] * 3], beside=(f"{R1}:format_reward=0",)),
    Case("open-r1", f"{R1}:format_reward", "format_reward", [SUM],
         [[TAGGED, "<answer>\n3\n</answer>", "3", TAGGED + "\nmore", "so\n" + TAGGED]], [[1, 0, 0, 1, 0]]),
    Case("open-r1", f"{R1}:tag_count_reward", "tag_count_reward", [SUM],
         [[TAGGED, "<think>\na\n</think>\n3", "3"]], [[1, 0.5, 0]]),
    Case("open-r1", f"{R1}:reasoning_steps_reward", "reasoning_steps_reward", [SUM],
         [["Step 1: a\nStep 2: b\nFinally, 3", "First, 3", "3", "1. a\n2. b"]], [[1, 1 / 3, 0, 1 / 3]]),
    Case("open-r1", f"{R1}:len_reward", "len_reward", [SUM],
         [[*BOXED[:2], "?" * 39, BOXED[0] + " is right."]], [[0.5, 0, -0.5, 0]]),
    Case("open-r1", f"{R1}:get_cosine_scaled_reward(max_len=38)", "cosine_scaled_reward", [SUM],
         [[*BOXED, ""]], [[0.75, -0.75, -0.5, -1]]),
    Case("open-r1", f"{R1}:get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)",
         "repetition_penalty_reward", [SUM], [["a b c d", "go go Go go", "", "go"]], [[0, -2 / 3, 0, 0]]),
    Case("open-r1", f"{R1}:get_code_format_reward(language='python')", "code_format_reward", [CPP],
         [[CODE.format("cpp"), CODE.format("python"), "1;"]], [[1, 0, 0]]),
    Case("open-r1", f"{R1}:get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10)",
         "soft_overlong_punishment_reward", [SUM], [["a" * 10, "a" * 15, "a" * 25]], [[0, -0.5, -1]]),
    Case("open-r1", f"{R1}:local_code_reward", "local_code_reward", [ADD],
         [[ADDS, "```python\nprint(5)\n```", "5"]], [[1, 0.5, 0]]),
    Case("open-r1", f"{R1}:code_reward", "code_reward", [SNIPPET], [[ADDS, "5", ""]], [[]],
         needs=E2B, why="pip install e2b-code-interpreter"),
    Case("open-r1", f"{R1}:binary_code_reward", "binary_code_reward", [SNIPPET], [[ADDS, "5", ""]], [[]],
         needs=E2B, why="pip install e2b-code-interpreter"),
]  # fmt: skip

TRLS = [
    Case("TRL", f"{TRL}/accuracy_rewards.py:accuracy_reward", "accuracy_reward", [SUM, PROOF],
         [BOXED, BOXED], [[1, 0, 0], [None] * 3], beside=(f"{TRL}/__init__.py:think_format_reward=0",)),
    Case("TRL", f"{TRL}/accuracy_rewards.py:reasoning_accuracy_reward", "reasoning_accuracy_reward",
         [SUM, PROOF],
         [[f"<think>a</think>{BOXED[0]}", f"<think>{BOXED[0]}</think>{BOXED[1]}", BOXED[0]]] * 2,
         [[1, 0, 0], [None, None, 0]], beside=(f"{TRL}/__init__.py:think_format_reward=0",)),
    Case("TRL", f"{TRL}/__init__.py:get_cosine_scaled_reward(max_len=38)", "cosine_scaled_reward",
         [SUM, PROOF], [[*BOXED, "?" * 99]] * 2, [[0.75, -0.75, -0.5, -0.5], [None] * 4],
         beside=(f"{TRL}/__init__.py:think_format_reward=0",)),
    Case("TRL", f"{TRL}/__init__.py:think_format_reward", "think_format_reward", [SUM],
         [["<think>a\nb</think> 3", "<think>a", "3", "<think>a<think>b</think> 3"]], [[1, 0, 0, 0]]),
    Case("TRL", f"{TRL}/__init__.py:get_repetition_penalty_reward(ngram_size=2)",
         "repetition_penalty_reward", [SUM], [["abcd", "aaaaa", ""]], [[0, -0.75, 0]]),
    Case("TRL", f"{TRL}/other_rewards.py:get_soft_overlong_punishment(20, 10)",
         "soft_overlong_punishment_reward", [SUM], [["a" * 10, "a" * 15, "a" * 25]], [[0, -0.5, -1]]),
    Case("TRL, own", f"{CUSTOM}:token_length_reward", "token_length_reward", [SUM],
         [["abc", "é", ""]], [[3, 2, 0]]),
    Case("TRL, own", f"{CUSTOM}:character_length_reward", "character_length_reward", [PLAIN],
         [["abc", "é", ""]], [[3, 1, 0]]),
    Case("TRL, own", f"{CUSTOM}:format_reward_func", "format_reward_func", [SUM],
         [["<think>a</think><answer>3</answer>", "<think>a\nb</think><answer>3</answer>", "3"]], [[1, 0, 0]]),
    Case("TRL, own", f"{CUSTOM}:sorted_digits_reward", "sorted_digits_reward", [DIGITS],
         [["1233", "1239", "?"]], [[1, 0.75, 0]]),
    Case("TRL, own", f"{CUSTOM}:boxed_reward_func", "boxed_reward_func", [PLAIN], [BOXES], [[1, 0, 0]]),
    Case("TRL, own", f"{CUSTOM}:math_reward_func", "math_reward_func", TASKS,
         [["42", "= 41", ""]] * 2, [[1, -1, -1], [None] * 3],
         beside=(f"{CUSTOM}:coding_reward_func",)),
    Case("TRL, own", f"{CUSTOM}:coding_reward_func", "coding_reward_func", TASKS[::-1],
         [["def add(a, b):\n    return a + b", "def add(", "?"]] * 2, [[1, -1, -1], [None] * 3],
         beside=(f"{CUSTOM}:math_reward_func",)),
    Case("TRL, own", f"{CUSTOM}:async_reward_func", "async_reward_func", [PLAIN],
         [["a", "", ""]], [[1, 0, 0]]),
    Case("TRL, own", f"{CUSTOM}:async_judge_reward", "async_judge_reward", [PLAIN], [BOXES], [[1, 0, 0]],
         beside=(f"{CUSTOM}:async_reward_func",)),
    Case("TRL, own", f"{CUSTOM}:sync_judge_reward", "sync_judge_reward", [PLAIN], [BOXES], [[1, 0, 0]]),
    Case("TRL, own", f"{CUSTOM}:logging_reward_func", "logging_reward_func", [PLAIN],
         [["72", "71", "?"]], [[1, 0, 0]], metrics=("accuracy",)),
    Case("TRL, own", f"{CUSTOM}:curriculum_reward", "curriculum_reward", [PLAIN],
         [["72", "71", "?"]], [[2, 0, 0]]),
]  # fmt: skip

DEMOS = [
    Case("GRPO demo", f"{DEMO}:correctness_reward_func", "correctness_reward_func", [CLIPS],
         [[XML.format(72), XML.format(71), "seventy-two", "72"]], [[2, 0, 0, 2]]),
    Case("GRPO demo", f"{DEMO}:int_reward_func", "int_reward_func", [CLIPS],
         [[XML.format(72), XML.format("many"), ""]], [[0.5, 0, 0]]),
    Case("GRPO demo", f"{DEMO}:strict_format_reward_func", "strict_format_reward_func", [CLIPS],
         [[XML.format(72), XML.format(72).replace("\na\n", "\na\nb\n"), "72"]], [[0.5, 0, 0]]),
    Case("GRPO demo", f"{DEMO}:soft_format_reward_func", "soft_format_reward_func", [CLIPS],
         [["<reasoning>a</reasoning> <answer>72</answer>", XML.format(72), "72"]], [[0.5, 0, 0]]),
    Case("GRPO demo", f"{DEMO}:xmlcount_reward_func", "xmlcount_reward_func", [CLIPS],
         [[XML.format(72), XML.format(72) + "more", "72"]], [[0.5, 0.496, 0]]),
]  # fmt: skip

UNSLOTHS = [
    Case("unsloth", f"{NOTEBOOK}:match_format_exactly", "match_format_exactly", [CLIPS],
         [[WORKED.format(72), WORKED.format(72) + "more", "72", WORKED.format(72) + "\n"]],
         [[3, 0, 0, 3]]),
    Case("unsloth", f"{NOTEBOOK}:match_format_approximately", "match_format_approximately", [CLIPS],
         [[WORKED.format(72), WORKED.format("</SOLUTION>"), "72"]], [[1.5, 0, -3]]),
    Case("unsloth", f"{NOTEBOOK}:check_answer", "check_answer", [CLIPS],
         [[*map(WORKED.format, (72, 50)), "72", *map(WORKED.format, (" 72 ", 70, 60, "many"))]],
         [[5, -2.5, -2, 3.5, 2, 1.5, -4.5]]),
    Case("unsloth", f"{NOTEBOOK}:check_numbers", "check_numbers", [CLIPS],
         [[*map(WORKED.format, ("72.0", "71")), "72", WORKED.format("7.2.")]], [[3.5, -1.5, -2.5, 0]]),
    Case("unsloth", "unsloth/language.py:format_and_language_reward_func", "format_and_language_reward_func",
         [CLIPS], [["Jawaban ini adalah 72", "This is the answer", "72"]], [[5, -3, -5]]),
    Case("unsloth", f"{VISION}:formatting_reward_func", "formatting_reward_func", [CAPTION],
         [["<REASONING>a</REASONING><SOLUTION>72</SOLUTION>", "<SOLUTION>72</SOLUTION>", "72"]], [[2, 1, 0]]),
    Case("unsloth", f"{VISION}:correctness_reward_func", "correctness_reward_func", [CAPTION],
         [["<SOLUTION>\n72\n</SOLUTION>", "<SOLUTION>71</SOLUTION>", "72"]], [[2, 0, 0]]),
]  # fmt: skip

VERLS = [
    Case("verl", f"verl:{SCORE}/gsm8k.py:compute_score", "compute_score", [verl()],
         [["#### 72", "#### 71", "72"]], [[1, 0, 0]]),
    Case("verl", f"verl:{SCORE}/math_dapo.py:compute_score", "compute_score", [verl("math_dapo")],
         [["Answer: 72", "Answer: 71", "72"]], [[1, -1, -1]], metrics=("acc",)),
    Case("verl", f"verl:{SCORE}/search_r1_qa_em.py:compute_score", "compute_score",
         [verl("searchR1_nq", {"target": ["Paris", "City of Paris"]})],
         [["<answer>the city of Paris.</answer>", "<answer>Lyon</answer>", "Paris"]], [[1, 0, 0]]),
    Case("verl", f"verl:{SCORE}/geo3k.py:compute_score", "compute_score", [verl("hiyouga/geometry3k")],
         [[*THOUGHT, BOXES[0]]], [[1, 0.1, 0, 0.9]]),
    Case("verl", f"verl:{SCORE}/prime_math.py:compute_score", "compute_score", [verl("numina_cn_k12")],
         [[r"\boxed{72.0}", *BOXES[1:]]], [[1, 0, 0]]),
    Case("verl", f"verl:{SCORE}/math_batch.py:compute_score_batched", "compute_score_batched",
         [verl("lighteval/MATH")], [[*BOXES, BOXES[2]]], [[1, 0, -0.25, -0.25]]),
    Case("verl", f"verl:{SCORE}/__init__.py:default_compute_score", "default_compute_score",
         [verl(), verl("numina_olympiads"), verl("math_dapo")],
         [["#### 72", "#### 71", "?"], [r"\boxed{72.0}", *BOXES[1:]], ["Answer: 72", "Answer: 71", "?"]],
         [[1, 0, 0], [1, 0, 0], [1, -1, -1]]),
    Case("verl", "verl:verl/custom_reward.py:my_reward_fn", "my_reward_fn", [verl()],
         [["It is 72\n", "It is 71", ""]], [[1.5, 0.5, 0.5]]),
    Case("verl", "verl:verl/custom_reward.py:compute_score", "compute_score", [verl()],
         [["72", "71", "nothing"]], [[0.998, -0.002, -0.007]], metrics=("acc", "length")),
    Case("verl", "verl:verl/custom_reward.py:compute_score_async", "compute_score_async", [verl()],
         [["It is 72", "It is 71", ""]], [[1, 0, 0]]),
    Case("TinyZero", "tinyzero:tinyzero/countdown.py:compute_score", "compute_score", [COUNTDOWN],
         [["<answer>3 * 8</answer>", "<answer>3 + 8</answer>", "24", "<answer>4 * 6</answer>"]],
         [[1, 0.1, 0, 0.1]]),
    Case("TinyZero", "tinyzero:tinyzero/multiply.py:compute_score", "compute_score", [PRODUCT],
         [["<answer>391</answer>", "<answer>390</answer>", "391"]], [[1, 0.1, 0]]),
]  # fmt: skip

OTHERS = [
    Case("verifiers", "verifiers:verifiers/gsm8k.py:rubric", "rubric", [CLIPS], [BOXES], [[1, 0, 0]]),
    Case("verifiers", "verifiers:verifiers/reverse_text.py:load_environment(format_weight=0.2)",
         "load_environment", [REVERSE],
         [["<think>a</think><answer>cba</answer>", "<answer>abc</answer>", "cba"]], [[1.2, 1 / 3 + 0.1, 0]]),
    Case("verifiers", "verifiers:verifiers/tools.py:rubric", "rubric", [CALLS],
         [[CALL.format("add"), CALL.format("sub"), "<tool>[</tool>", "?" * 71]], [[1.5, 0.5, 0.5, 0]]),
    Case("OpenRLHF", "openrlhf:openrlhf/math_reward_func.py:reward_func", "reward_func", [LABELLED], [BOXES],
         [[1, 0, 0]], metrics=("math_accuracy",)),
    Case("OpenRLHF", "openrlhf:openrlhf/reward_func.py:reward_func", "reward_func", [LABELLED],
         [["It is 72", "It is 71", ""]], [[2, -2, -2]], metrics=("scores",)),
    Case("OpenRLHF", "openrlhf:openrlhf/plain.py:reward_func", "reward_func", [LABELLED],
         [["It is 72", "It is 71", ""]], [[1, 0, 0]]),
    Case("LightRFT", "lightrft:lightrft/gsm8k_geo3k.py:reward_fn", "reward_fn", [RULED], [THOUGHT],
         [[1, 0.1, 0]], metrics=("accuracy_reward", "format_reward")),
    Case("LightRFT", "lightrft:lightrft/grm_vl.py:reward_fn", "reward_fn", [PAIRED],
         [[CHOICE.format("Image 1 is better"), CHOICE.format("Image 2 is better"), "1"]], [[2, 1, 0]]),
    Case("LightRFT", "lightrft:lightrft/aqa.py:reward_fn", "reward_fn", [RULED],
         [["<answer>72</answer>", "<answer>71</answer>", "72"]], [[2, 1, 0]],
         needs="a GPU: it asks for \"cuda\" by name", why="CUDA|NVIDIA"),
]  # fmt: skip

CASES = [*OPEN_R1, *TRLS, *DEMOS, *UNSLOTHS, *VERLS, *OTHERS]
