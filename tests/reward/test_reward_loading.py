"""Reward functions from a command line: where they lie, what they are called, and what is refused."""

import sys

import pytest

from rft_fn import reward

FILE = """
import functools

def length(completions, **columns):
    return [float(len(c)) for c in completions]

def get_cosine(max_len=10, *, low=0.0):
    def cosine_scaled(completions, **columns):
        return [low + len(c) / max_len for c in completions]
    return cosine_scaled

def get_ngram(size: int, penalty: float):
    return lambda completions: [penalty * size for _ in completions]

def makes_nothing(scale):
    return scale

def anything(*args, **kwargs):
    return length

class Scaled:
    def __init__(self, scale=2):
        self.scale = scale

    def __call__(self, completions, **columns):
        return [float(self.scale * len(c)) for c in completions]

scaled = Scaled(3)
tripled = functools.partial(get_cosine(), low=1)

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return float(solution_str == ground_truth) + bonus

def reward_func(queries, prompts, labels):
    return [float(q.endswith(l)) for q, l in zip(queries, labels)]

def reward_fn(model_reward_list, labels, queries, refs, label_map):
    return [1.0 for _ in queries], {}

def exact_answer(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)

class Rubric:
    funcs, weights = [exact_answer], [0.5]

rubric = Rubric()

def load_environment(weight=0.5):
    made = Rubric()
    made.weights = [weight]
    return made
"""


@pytest.fixture(autouse=True)
def path_of_modules(monkeypatch):
    """Folders of rewards join the path; those of a test leave it."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def run(spec, texts=("ab",), **columns):
    """(the names of the parts, the total)."""
    found = reward.parse([spec])(["p"] * len(texts), list(texts), columns)
    return list(found.parts), found.total.tolist()


@pytest.mark.parametrize(
    ("spec", "name", "value"),
    [
        ("{}:length", "length", 2.0),
        ("{}:get_cosine(max_len=4)", "cosine_scaled", 0.5),
        ("{}:get_cosine(4, low=-1.5)=2", "cosine_scaled", -2.0),
        ("{}:get_cosine()", "cosine_scaled", 0.2),
        ("{}:get_ngram(size=3, penalty=-1)", "get_ngram", -3.0),  # a lambda has no name of its own
        ("{}:Scaled()", "Scaled", 4.0),
        ("{}:scaled=0.5", "scaled", 3.0),
        ("messages:{}:length", "length", 1.0),
        ("text:{}:length", "length", 2.0),
        ("text:{}:get_cosine(4)", "cosine_scaled", 0.5),
    ],
)
def test_a_reward_is_named_by_its_function(mine, spec, name, value):
    assert run(spec.format(mine)) == ([name], [pytest.approx(value)])


@pytest.mark.parametrize(
    ("spec", "name", "value"),
    [
        ("numeric(boxed=True)", "numeric", 0.0),
        ("numeric('gold')", "numeric", 1.0),
        ("numeric:gold(boxed=False)", "numeric", 1.0),
        ("tags('think', 'answer')", "tags", 0.0),
        ("messages:exact:gold", "exact", 1.0),
    ],
)
def test_named_rewards_take_arguments_too(spec, name, value):
    assert run(spec, ["7"], gold=["7"], answer=["7"]) == ([name], [value])


@pytest.mark.parametrize(("spec", "name", "columns", "values"), [
    ("verl:{}:compute_score", "compute_score", ("data_source", "reward_model.ground_truth"), [1.0, 0.0]),
    ("verl:{}:compute_score:gold", "compute_score", ("data_source", "gold"), [1.0, 0.0]),
    ("verl:{}:compute_score(bonus=0.5)=2", "compute_score", ("data_source", "reward_model.ground_truth"),
     [3.0, 1.0]),
    ("openrlhf:{}:reward_func:gold", "reward_func", ("gold",), [1.0, 0.0]),
    ("lightrft:{}:reward_fn:gold", "reward_fn", ("label", "gold"), [1.0, 1.0]),
    ("verifiers:{}:rubric:gold", "rubric", ("gold",), [0.5, 0.0]),
    ("verifiers:{}:exact_answer:gold", "exact_answer", ("gold",), [1.0, 0.0]),
    ("verifiers:{}:load_environment(weight=3)", "load_environment", ("answer",), [3.0, 0.0]),
])  # fmt: skip
def test_adapters_by_name(mine, spec, name, columns, values):
    found = reward.parse([spec.format(mine)])
    assert reward.columns(found) == columns and list(found.components) == [name]
    rows = {name: ["7", "7"] for name in ("data_source", "gold", "label", "answer")}
    rows["reward_model"] = [{"ground_truth": "7"}] * 2
    assert found(["p", "p"], ["7", "8"], rows).total.tolist() == values


def test_rewards_of_one_host_are_named_by_their_paths():
    """A query may be long, and names are keys of metrics."""
    found = reward.parse(["http://h:1/a?model=x", "http://h:1/b?model=y", "https://g/s?model=x"])
    assert list(found.components) == ["http://h:1/a", "http://h:1/b", "g"]


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="reward: expected different names, got name='x' twice"):
        reward.parse(["http://a/s(name='x')", "http://b/s(name='x')"])
    assert list(reward.parse(["http://a/s(name='x')", "http://b/s"]).components) == ["x", "b"]


@pytest.mark.parametrize("other", ["math", "math:gold", "https://b/s", "{}:length", "task:sort_digits"])
def test_a_given_name_is_no_other_rewards(mine, other):
    """A veto on it would bind to either, and one of them would be renamed without a word."""
    specs = [other.format(mine), "numeric:a", "numeric:b"]
    taken = reward.parse(specs).components
    for name in taken:
        named = f"http://a/s(name={name!r})"
        line = f"^reward: expected a name that no other reward has, got name={name!r}$"
        for order in ([named, *specs], [*specs, named]):
            with pytest.raises(ValueError, match=line):
                reward.parse(order)
    both = reward.parse([*specs, "http://a/s(name='free')"])
    assert list(both.components) == [*taken, "free"]


@pytest.mark.parametrize(
    "word", ["key", "api_key", "apiKey", "access_token", "X-Amz-Signature", "sig", "auth"]
)
@pytest.mark.parametrize(
    "hosts", ["http://a/s?n=1&{}=S1", "http://a/s?n=1&{}=S1,http://b/s", "http://a/s,http://b/s?{}="]
)
def test_a_secret_does_not_get_into_a_runs_files(word, hosts):
    with pytest.raises(ValueError, match="expected an address without a secret") as error:
        reward.parse([hosts.format(word) + "=0.5"])
    assert repr(word) in str(error.value) and "S1" not in str(error.value)
    assert "RFT_REWARD_TOKEN" in str(error.value)


def test_other_words_of_a_query_are_no_secrets():
    reward.parse(["http://a/s?keyword=x&monkey=y&author=z&significance=1"])


def test_a_secret_of_a_later_address_or_in_an_argument_is_not_shown():
    with pytest.raises(ValueError, match="got 'api_key' in its query") as error:
        reward.parse(["http://a/s?n=1,http://b/s?n=2&api%5Fkey=S1"])
    assert "S1" not in str(error.value)

    def refuses(target, servers):
        raise ValueError("no")

    spec = "judge:tiny(servers=('http://me:S1@h:1/?n=2&api_key=S1','http://g?token=S1'))"
    with pytest.raises(ValueError) as error:
        reward.parse([spec], {"judge": refuses})
    assert str(error.value) == f"reward {spec.replace('me:S1', '***').replace('S1', '***')!r}: no"


def test_rewards_of_easyr1_get_dicts(tmp_path):
    file = tmp_path / "easy.py"
    file.write_text(
        "def batch(reward_inputs, scale=1.0):\n"
        "    right = [x['response'] == x['ground_truth'] for x in reward_inputs]\n"
        "    return [{'overall': scale * r, 'accuracy': float(r)} for r in right]\n\n"
        "def single(reward_input):\n    return batch([reward_input])[0]\n"
    )
    rows = {"answer": ["7", "7"]}
    for spec, value in (("batch", 1), ("batch(scale=2.0)", 2), ("single", 1)):
        found = reward.parse([f"easyr1:{file}:{spec}"])(["p", "p"], ["7", "8"], rows)
        assert found.total.tolist() == [value, 0]
    for name in ("batch", "single"):
        with pytest.raises(ValueError, match=f"as functions for easyr1 do; write easyr1:.*{name}"):
            reward.load(f"{file}:{name}")


def test_two_rewards_of_one_name_are_told_apart(tmp_path, mine):
    (tmp_path / "other.py").write_text(FILE)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/mine.py").write_text(FILE)
    specs = [f"{mine}:length", f"{tmp_path}/other.py:length", f"{mine}:scaled", "math:a", "math:b", "exact"]
    names = ["mine:length", "other:length", "scaled", "math:a", "math:b", "exact"]
    assert list(reward.parse(specs).components) == names
    same = [
        f"{mine}:length",
        f"{tmp_path}/sub/mine.py:length",
        f"{mine}:get_cosine(2)",
        f"{mine}:get_cosine(4)",
    ]
    names = [
        "mine:length",
        "mine:length:2",
        "mine:get_cosine:cosine_scaled",
        "mine:get_cosine:cosine_scaled:2",
    ]
    found = reward.parse([f"{spec}={i}" for i, spec in enumerate(same)])
    assert list(found.components) == names and list(found.specs.values()) == same
    assert found(["p"], ["ab"], {}).total.tolist() == [0 * 2 + 1 * 2 + 2 * 1.0 + 3 * 0.5]


@pytest.mark.parametrize(("spec", "message"), [
    ("{}:get_cosine(max_len=open('x'))", "expected arguments that are literals, such as 0.5, 'text', "
     "[1, 2] or True, got (max_len=open('x'))"),
    ("{}:get_cosine(**x)", "expected arguments that are literals"),
    ("{}:get_cosine(size=1)", "get_cosine() got an unexpected keyword argument 'size'"),
    ("{}:get_cosine(1)(2)", "expected NAME(arguments), got parentheses that are no call"),
    ("{}:makes_nothing(3)", "expected a call that makes a reward function, got int"),
    ("{}:get_ngram", "expected a function of completions, got one of (size, penalty); if it makes reward "
     "functions, call it: {}:get_ngram(size=..., penalty=...)"),
    ("{}:get_cosine", "expected a function of completions, got one of (max_len, low); if it makes reward "
     "functions, call it: {}:get_cosine(max_len=..., low=...)"),
    ("{}:Scaled", "'Scaled' is a class; call it: {}:Scaled()"),
    ("{}:compute_score", "it takes solution_str, as functions for verl do; write verl:{}:compute_score"),
    ("{}:reward_func", "it takes queries, as functions for openrlhf do; write openrlhf:{}:reward_func"),
    ("{}:reward_fn", "it takes model_reward_list, as functions for lightrft do; write lightrft:"),
    ("{}:exact_answer", "it takes completion, as functions for verifiers do; write verifiers:"),
    ("{}:rubric", "'rubric' is Rubric, not a function"),
    ("{}:length:gold", "expected no column, the function names those that it reads, got 'gold'"),
    ("verl:{}:compute_score(1)", "expected NAME=VALUE, as in verl's reward_kwargs, got 1 alone"),
    ("format:gold", "format reads no column"),
    ("no_such_package.mod:fn", "no module 'no_such_package' is installed or lies in "),
    ("json.no_such:fn", "no module 'json.no_such' is installed or lies in "),
    ("verl:math.py", "expected one of math, numeric"),
])  # fmt: skip
def test_what_cannot_be_a_reward_is_said(mine, spec, message):
    spec = spec.format(mine)
    with pytest.raises(ValueError) as error:
        reward.load(spec)
    assert str(error.value).startswith(f"reward {spec!r}: {message.format(mine)}")


def test_a_word_that_nearly_names_a_source_brings_it_to_mind():
    with pytest.raises(ValueError, match="no module 'modle'") as error:
        reward.parse(["modle:rm"], {"model": lambda target: None})
    assert "did you mean 'model:rm'?" in error.value.__notes__
    with pytest.raises(ValueError, match="no module 'zzz'") as error:
        reward.parse(["zzz:fn"], {"model": lambda target: None})
    assert not hasattr(error.value, "__notes__")


def test_a_factory_that_takes_anything_is_found_when_it_is_called(mine):
    line = "reward 'anything': expected a list of 1 numbers, got the function 'length'; if 'anything' makes "
    with pytest.raises(ValueError, match=line + "reward functions, call it: NAME"):
        run(f"{mine}:anything")


def test_a_call_of_a_function_that_is_a_reward_itself_says_so(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, *, limit=4):\n    return [0.0 for x in completions]\n")
    with pytest.raises(ValueError, match="called once and has to return a reward, but short is one itself"):
        reward.parse([f"{file}:short(limit=2)"])


def test_a_path_may_have_parentheses(tmp_path):
    folder = tmp_path / "copy (1)"
    folder.mkdir()
    (folder / "mine.py").write_text(FILE)
    assert run(f"{folder}/mine.py:length") == (["length"], [2.0])
    assert run(f"{folder}/mine.py:get_cosine(4)=3") == (["cosine_scaled"], [1.5])


def package(root, name, word):
    """ROOT/NAME/{__init__, helper, rewards/{__init__, length}}.py with relative imports up and beside."""
    folder = root / name
    (folder / "rewards").mkdir(parents=True)
    (folder / "__init__.py").write_text(f"WORD = {word!r}\n")
    (folder / "helper.py").write_text("from . import WORD\n")
    (folder / "rewards/__init__.py").write_text("")
    (folder / "rewards/near.py").write_text("SCALE = 2.0\n")
    (folder / "rewards/length.py").write_text(
        "from ..helper import WORD\nfrom .near import SCALE\n\n"
        "def counts(completions, **columns):\n    return [SCALE * c.count(WORD) for c in completions]\n"
    )
    return folder / "rewards/length.py"


def test_a_file_with_relative_imports_is_a_member_of_its_package(tmp_path):
    """Two packages of one name are two."""
    first, second = package(tmp_path / "x", "pkg", "a"), package(tmp_path / "y", "pkg", "b")
    assert run(f"{first}:counts", ["aab"])[1] == [4.0]
    assert run(f"{second}:counts", ["aab"])[1] == [2.0]


def test_relative_imports_need_no_init(tmp_path):
    path = package(tmp_path, "pkg", "a")
    for folder in (path.parent, path.parent.parent):
        (folder / "__init__.py").unlink()
    (path.parent.parent / "helper.py").write_text("WORD = 'b'\n")
    assert run(f"{path}:counts", ["aab"])[1] == [2.0]


def test_a_file_beside_an_init_without_relative_imports_runs_alone(tmp_path):
    (tmp_path / "__init__.py").write_text("raise RuntimeError('not to be run')\n")
    (tmp_path / "mine.py").write_text(FILE)
    assert run(f"{tmp_path}/mine.py:length")[1] == [2.0]


def test_a_file_imports_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_the_reward.py").write_text("SCALE = 5.0\n")
    (tmp_path / "mine.py").write_text(
        "from beside_the_reward import SCALE\n\n"
        "def five(completions):\n    return [SCALE for _ in completions]\n"
    )
    assert run(f"{tmp_path}/mine.py:five")[1] == [5.0]


def test_modules_are_installed_or_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package(tmp_path, "pkg_of_rewards", "a")
    assert run("pkg_of_rewards.rewards.length:counts=0.5", ["aab"]) == (["counts"], [2.0])


def test_a_module_that_fails_to_import_another_keeps_its_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "needs_more.py").write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library") as error:
        reward.load("needs_more:fn")
    assert error.value.__notes__ == ["raised by the file of the reward 'needs_more:fn'"]


def test_a_file_runs_once_for_all_its_functions_and_anew_when_it_has_changed(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "seen = []\n\ndef a(completions):\n    seen.append(1)\n    return [float(len(seen))]\n\nb = a\n"
    )
    total = reward.parse([f"{path}:a", f"{path}:b"])(["p"], ["x"], {}).parts
    assert [x.tolist() for x in total.values()] == [[1.0], [2.0]]  # one list
    path.write_text(path.read_text().replace("float(len(seen))", "-1.0"))
    assert run(f"{path}:a", ["x"])[1] == [-1.0]


def test_a_package_that_does_not_run_is_named(tmp_path):
    path = package(tmp_path, "pkg", "a")
    (path.parent / "near.py").write_text("def broken(:\n")
    with pytest.raises(ValueError, match=r"^reward '.*length.py:counts': .*near.py, line 1: invalid syntax$"):
        reward.load(f"{path}:counts")
    (path.parent / "near.py").write_text("SCALE = 1.0\n")
    assert run(f"{path}:counts", ["aab"])[1] == [2.0]
