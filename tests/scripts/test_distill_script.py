"""distill.py: every teacher and way of learning runs, resumes, and says in one line what it cannot do."""

import signal
from contextlib import suppress

import pytest
import torch
from fake_server import FakeServer, serving
from script_runs import rows, start
from script_runs import run as run_process
from test_house import load_script

import rft_fn as rft
from rft_fn.collect import Batch
from rft_fn.run import distillation, teachers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_runs")]

SMALL = {"prompts": 4, "group": 4, "steps": 2, "eval_prompts": 4, "eval_every": 100, "save_every": 100}
FLAGS = ["--prompts", 4, "--group", 4, "--steps", 4, "--eval-prompts", 4, "--eval-every", 100]
HINT = "{short}{answer};{short}"


def run(folder, **options):
    """The metrics of a run in this process."""
    script = load_script("distill")
    script.main(script.Config(**SMALL | options, out=str(folder)))
    return rows(folder)


def other(seed):
    """The embedded default with noise on its weights."""
    module = rft.model.load("tiny")
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p += 0.02 * torch.randn(p.shape, generator=g)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two teachers."""
    found = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("teachers") / str(seed)
        rft.model.save(folder, other(seed), rft.model.load_tokenizer("tiny"))
        found.append(str(folder))
    return found


def test_hidden_states_and_all_words_teach_the_same(tmp_path, folders):
    """Two ways to the same distributions; the divergence of a step falls when it is learned."""
    exact = run(tmp_path / "exact", teacher=(folders[0],), steps=6, warmup=0)
    words = run(tmp_path / "words", teacher=(folders[0],), top_k=48, warmup=0)
    for a, b in zip(exact, words):
        for name in ("distill/divergence", "distill/agreement", "distill/kl_sampled", "grad/norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name
    assert exact[-1]["distill/divergence"] < 0.7 * exact[0]["distill/divergence"]
    assert words[0]["distill/tail"] < 1e-6
    assert all(x["policy/logp_gap"] < 1e-4 and x["distill/taught"] == 1 for x in exact)
    few = run(tmp_path / "few", teacher=(folders[0],), top_k=4, warmup=0)
    assert few[0]["distill/divergence"] < exact[0]["distill/divergence"] and few[0]["distill/tail"] > 1e-3


WAYS = {
    "jsd": {"loss": "jsd", "jsd_beta": 0.9},
    "skewed": {"loss": "skew_reverse_kl", "skew": 0.4},
    "sampled": {"loss": "sampled"},
    "to go": {"loss": "to_go", "gamma": 0.9},
    "rewards too": {"loss": "forward_kl", "rl": 0.5},
    "temperature": {"teacher_temperature": 0.5},
    "top_p": {"top_p": 0.9},
    "hint": {"hint": HINT},
    "adapters": {"lora_rank": 4},
    "passes": {"epochs": 2, "minibatches": 2},
    "whole responses": {"max_new": 4, "mask_truncated": True},
    "and those cut off": {"max_new": 4},
}


def test_every_option_changes_what_is_learned(tmp_path, folders):
    """No two ways have the same gradients, and all are finite."""
    norms = {"plain": run(tmp_path / "plain", teacher=(folders[0],), warmup=0)[-1]["grad/norm"]}
    for name, options in WAYS.items():
        found = run(tmp_path / name, teacher=(folders[0],), warmup=0, **options)
        norms[name] = found[-1]["grad/norm"]
    assert all(x > 0 for x in norms.values())
    assert len({round(x, 5) for x in norms.values()}) == len(norms), norms


def test_noise_and_the_kl_of_updates_are_measured_on_request(tmp_path, folders):
    plain, asked = (
        run(tmp_path / str(every), teacher=(folders[0],), warmup=0, noise_every=every, update_kl=bool(every))
        for every in (0, 1)
    )
    assert all("grad/noise_scale" in row and row["policy/kl_update"] > 0 for row in asked)
    assert not any("grad/noise_scale" in row or "policy/kl_update" in row for row in plain)


@pytest.mark.parametrize("beta", [0.2, 0.8])
def test_beta_is_of_jsd(tmp_path, folders, beta):
    found = run(tmp_path / "run", teacher=(folders[0],), loss="jsd", jsd_beta=beta, steps=1)
    assert 0 < found[0]["distill/divergence"] < 0.7


def test_an_average_of_the_student_is_the_student_at_first(tmp_path):
    found = run(tmp_path / "run", teacher=("ema",), ema=0.5, steps=3, warmup=0, rl=1.0)
    assert found[0]["distill/divergence"] < 1e-9 and found[0]["distill/agreement"] == 1
    assert found[2]["distill/divergence"] > 1e-7


def test_the_student_teaches_itself_by_an_answer(tmp_path):
    """Its prompt has the answer, and its responses become likelier behind the plain one."""
    found = run(tmp_path / "run", teacher=("self",), hint=HINT, steps=8, warmup=0, lr=3e-3)
    assert found[0]["distill/divergence"] > 0.01 and all(x["distill/taught"] == 1 for x in found)


FEEDBACK = """
def graded(completions, answer, log_extra, **columns):
    log_extra("feedback", [None if text == "" else f"{len(text)}" for text in completions])
    return [float(i % 2) for i in range(len(completions))]
"""


def test_hints_have_a_success_of_the_group_and_feedback(tmp_path):
    """A row without one is not taught; a success is another response with the reward asked for."""
    (tmp_path / "graded.py").write_text(FEEDBACK)
    reward = (f"{tmp_path}/graded.py:graded",)
    hint = "{short}{success};{short}"
    found = run(tmp_path / "success", teacher=("self",), hint=hint, reward=reward)
    assert found[0]["distill/taught"] == 1
    none = run(tmp_path / "none", teacher=("self",), hint=hint, reward=reward, success_at=2.0)
    assert none[0]["distill/taught"] == 0 and none[0]["distill/loss"] == 0
    found = run(tmp_path / "feedback", teacher=("self",), hint="{short}{feedback};{short}", reward=reward)
    assert 0 < found[0]["distill/taught"] <= 1
    with pytest.raises(ValueError, match="hint: expected a reward that gives `feedback`"):
        run(tmp_path / "no", teacher=("self",), hint="{short}{feedback};{short}")


def test_each_row_has_the_teacher_of_its_column(tmp_path, folders):
    """Of two teachers, by level; a value without one is named."""
    data = ("sort_digits:1", "sort_digits:2")
    names = tuple(f"{i}={folder}" for i, folder in enumerate(folders, 1))
    both = run(tmp_path / "both", teacher=names, teacher_column="level", data=data, steps=1)
    one = run(tmp_path / "one", teacher=(folders[0],), data=data, steps=1)
    two = run(tmp_path / "two", teacher=(folders[1],), data=data, steps=1)
    low, high = sorted(x[0]["distill/divergence"] for x in (one, two))
    assert low < both[0]["distill/divergence"] < high
    with pytest.raises(ValueError, match="teacher: expected one for level '2', got some for 1"):
        run(tmp_path / "wrong", teacher=(names[0],), teacher_column="level", data=data)


def test_steps_of_others_responses_come_between_its_own(tmp_path, folders):
    found = run(tmp_path / "given", teacher=(folders[0],), on_policy=0.5, off_policy="given", steps=4)
    assert ["policy/logp_gap" in x for x in found] == [False, True, False, True]
    assert found[0]["reward/mean"] == 1 and found[1]["reward/mean"] < 1
    own = run(tmp_path / "own", teacher=(folders[0],), on_policy=0.0, loss="forward_kl")
    assert all("policy/logp_gap" not in x and "distill/kl_sampled" not in x for x in own)
    two = tuple(f"{i}={folder}" for i, folder in enumerate(folders, 1))
    data = ("sort_digits:1", "sort_digits:2")
    run(tmp_path / "two", teacher=two, teacher_column="level", data=data, on_policy=0.0, hint=HINT)


def test_simple_self_distillation_is_likelihood_of_sharper_samples(tmp_path):
    """The student's own samples, colder and cut, learned by their likelihood (2604.01193)."""
    cold = {"teacher_temperature": 0.5, "teacher_top_p": 0.8}
    found = run(tmp_path / "run", teacher=("self",), on_policy=0.0, loss="nll", **cold)
    plain = run(tmp_path / "plain", teacher=("self",), on_policy=0.0, loss="nll")
    assert 0 < found[0]["distill/loss"] < plain[0]["distill/loss"]
    given = run(tmp_path / "given", on_policy=0.0, off_policy="given", loss="nll", response="{answer}")
    assert given[0]["reward/mean"] == 1


@pytest.mark.parametrize("kind", ["openai", "sglang"])
def test_a_server_teaches_as_its_folder_does(tmp_path, folders, kind):
    with serving(FakeServer(other(1), rft.model.load_tokenizer("tiny"))) as (fake,):
        for name, options in {"words": {"top_k": 5}, "sampled": {"loss": "sampled"}}.items():
            served = run(tmp_path / f"{kind}_{name}", teacher=(f"{kind}:{fake.url}",), **options)
            local = run(tmp_path / f"local_{name}", teacher=(folders[0],), **options)
            for a, b in zip(served, local):
                assert a.keys() == b.keys()
                for key in ("grad/norm", "distill/kl_sampled", "distill/loss"):
                    assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("kind", ["openai", "sglang"])
def test_what_a_server_cannot_give_is_said_before_a_model_is_loaded(tmp_path, monkeypatch, kind):
    def loaded(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(rft.model, "load", loaded)
    tokenizer = rft.model.load_tokenizer("tiny")

    def line(fake, **options):
        with pytest.raises(ValueError) as error:
            run(tmp_path / "run", teacher=(f"{kind}:{fake.url}",), **options)
        assert "\n" not in str(error.value)
        return str(error.value)

    fake = FakeServer(None, tokenizer)
    assert line(fake).startswith("top_k: expected a number of words with a teacher on a server")
    hot = line(fake, top_k=5, teacher_temperature=0.5)
    assert hot.startswith("teacher_temperature: expected 1 with a teacher on a server")
    fake.port = 9  # nobody listens there
    assert line(fake, top_k=5).startswith("teacher: http://127.0.0.1:9: /")
    fake.port = 0
    assert line(fake, top_k=5).startswith("teacher: expected addresses like http://HOST:8000")
    monkeypatch.undo()
    with serving(FakeServer(other(1), tokenizer)) as (fake,):
        monkeypatch.setattr(rft.model, "load", loaded)
        if kind == "openai":
            said = line(fake, top_k=30)
            assert said.startswith("top_k: expected 30 words") and said.endswith("--max-logprobs 30")
        fake.text = lambda token: "x"
        assert "expected the tokenizer of the student, whose token" in line(fake, top_k=5)


def test_a_server_that_stops_ends_the_run_in_one_line(tmp_path):
    with serving(FakeServer(other(1), rft.model.load_tokenizer("tiny"), window=9)) as (fake,):
        with pytest.raises(ValueError, match="expected at most 8 tokens of prompt and response, got"):
            run(tmp_path / "run", teacher=(f"openai:{fake.url}",), top_k=5)
        fake.window = 128
        teach = teachers.Teachers.say

        def broken(self, *args):
            fake.end()
            fake.http = None
            return teach(self, *args)

        with pytest.MonkeyPatch.context() as patch, suppress(AttributeError):
            patch.setattr(teachers.Teachers, "say", broken)
            with pytest.raises(rft.engine.EngineDead, match="teacher: http://127"):
                run(tmp_path / "dead", teacher=(f"openai:{fake.url}",), top_k=5)


def test_another_tokenizer_is_refused_by_name(tmp_path, folders):
    ours = rft.model.load_tokenizer("tiny")

    class Theirs:
        def get_vocab(self):
            return ours.get_vocab() | {"<more>": len(ours)}

    with pytest.raises(ValueError) as error:
        distillation.require_same_words("teacher: DIR", Theirs(), ours)
    assert str(error.value).startswith("teacher: DIR: expected the tokenizer of the student, whose token 48")
    distillation.require_same_words("teacher: DIR", rft.model.load_tokenizer(folders[0]), ours)


@pytest.mark.parametrize(
    "options", [["--on-policy", 0.5], ["--ema", 0.9, "--top-k", 4]], ids=["mixed", "words"]
)
def test_kill_9_and_the_same_command_again(tmp_path, folders, options):
    """Equal files at the end."""
    args = [*FLAGS, "--save-every", 2, "--teacher", folders[0], *options]
    run_process("distill", *args, "--out", tmp_path / "straight")
    args += ["--out", tmp_path / "killed"]
    process = start("distill", *args, interrupted=(signal.SIGKILL, 2, 0.0))
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    run_process("distill", *args)
    for name in ("metrics.jsonl", "trajectories.jsonl", "model/model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name


@pytest.mark.parametrize(
    "options",
    [["--teacher", "self", "--hint", HINT], ["--top-k", 4, "--loss", "jsd"], ["--on-policy", 0.5]],
    ids=["hint", "words", "mixed"],
)
@pytest.mark.parametrize(
    "strategy", [[], ["--strategy.zero-stage", 3], ["--strategy.sp-size", 2]], ids=["fsdp2", "zero3", "sp"]
)
def test_two_processes_log_what_one_logs(tmp_path, folders, options, strategy):
    teacher = [] if "--teacher" in options else ["--teacher", folders[0]]
    for world in (1, 2):
        more = strategy if world == 2 else []
        run_process("distill", *FLAGS, *teacher, *options, *more, "--out", tmp_path / str(world), world=world)
    one, two = rows(tmp_path / "1"), rows(tmp_path / "2")
    assert len(two) == 4 and [r["reward/mean"] for r in one] == [r["reward/mean"] for r in two]
    for a, b in zip(one, two):
        assert a.keys() == b.keys()
        for name in [x for x in a if x.startswith(("distill/", "grad/norm"))]:
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=1e-6), name


def test_a_teacher_is_on_the_host_while_it_does_not_score(tmp_path, folders):
    """With offload_models, and the numbers are the same."""
    seen = []
    score = teachers._Member.score

    def watched(self, state, rows):
        where = [self.bound[0].residence.on_host]
        found = score(self, state, rows)
        seen.append([*where, self.bound[0].residence.on_host])
        return found

    plain = run(tmp_path / "plain", teacher=(folders[0],))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teachers._Member, "score", watched)
        config = rft.strategy.StrategyConfig(offload_models=True, engine_batch=512)
        moved = run(tmp_path / "moved", teacher=(folders[0],), strategy=config)
    assert seen == [[True, True]] * 2 and moved == plain


def test_rollouts_may_be_sampled_ahead(tmp_path, folders):
    found = run(tmp_path / "run", teacher=(folders[0],), ahead=1, steps=3)
    assert [x["rollout/staleness_max"] for x in found] == [0, 1, 1] and "mismatch/weight" in found[2]


@pytest.mark.parametrize(("name", "task"), [("tiny-vl", "count_squares"), ("tiny-audio", "tone")])
def test_a_student_that_sees_or_hears_is_taught_by_an_answer(tmp_path, name, task):
    """The teacher's prompt has the media too."""
    hint = "{question} It is {answer}."
    found = run(tmp_path / "run", model=name, data=(task,), teacher=("self",), hint=hint, max_new=4)
    assert all(x["distill/divergence"] > 0 for x in found)
    tuned = run(tmp_path / "off", model=name, data=(task,), teacher=(name,), on_policy=0.0, max_new=4)
    assert len(tuned) == 2


def test_values_go_back_to_the_tokens_that_they_are_of():
    """Sampled tokens keep their order behind another prompt; teachers of other widths are padded."""
    source = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]).bool()
    target = torch.tensor([[0, 1, 1], [0, 1, 1]]).bool()
    x = torch.arange(8.0).view(2, 4, 1)
    assert teachers._moved(x, source, target)[..., 0].tolist() == [[0, 2, 3], [0, 5, 6]]
    first = teachers._joined(None, torch.ones(1, 3, 2), torch.tensor([1]), 2)
    both = teachers._joined(first, torch.ones(1, 3, 4), torch.tensor([0]), 2)
    assert both.shape == (2, 3, 4) and both.sum(-1)[:, 0].tolist() == [4, 2]
    assert Batch._fields[:2] == ("prompts", "rollout")
