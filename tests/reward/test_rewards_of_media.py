"""Rewards of prompts with two images each: of a model, of a judge that sees, and of a server."""

import base64
import json
from functools import partial

import pytest
import ranks
import torch
from fake_host import hosting, rewards
from tiny import rollout as rollout_of

import rft_fn as rft
from rft_fn import collect, data, model, packing, reward, tree
from rft_fn.environment.tiny_media_models import VISION
from rft_fn.environment.tiny_models import new_tokenizer
from rft_fn.reward import forms, wire
from rft_fn.run import load_rewards, options
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy
from rft_fn.types import Media, Sampling

G = 3  # responses to each prompt
N = 5  # prompts


def seeing():
    """The processing of tiny-vl, with no model."""
    tokenizer = new_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION.tokens)})
    tokenizer.chat_template = VISION.template
    return data.Processing(VISION.new_processor(tokenizer), data.MediaLimits())


def untrained(tokenizer):
    """A model of tiny-vl's size, its weights large enough that pixels matter."""
    torch.manual_seed(0)
    lm = VISION.new_model(tokenizer).eval()
    with torch.no_grad():
        for p in lm.parameters():
            if p.dim() > 1:
                p.normal_(std=p[0].numel() ** -0.5)
    return lm


def asked(processing):
    """Prompts with two images, most of which ask the same in words."""
    how = {"template": "{short}", "processing": processing, "columns": ("answer",)}
    dataset = data.load("count_squares:2", processing.tokenizer, **how)
    return data.take(dataset, N, 0)[0]


def answered(prompts, tokenizer):
    """G responses to each prompt: its answer, the other one, and neither."""
    rows = []
    for p in prompts:
        right = p.columns["answer"]
        texts = [right, {"1": "2", "2": "1"}[right], "3"]
        rows += [(p.ids, [*tokenizer.encode(x, add_special_tokens=False), 1]) for x in texts]
    exp = packing.supervised(rows)
    media = Media.of_prompts([p.media for p in prompts], G)
    return rollout_of(exp, torch.arange(len(rows)) // G, media=media)


def sizes(completions, media):
    """How many bytes the files of each prompt have."""
    return [float(sum(len(x["bytes"]) for x in files)) for files in media]


class Alone:
    """A reward model, the prompts, the responses, and their score on some ranks."""

    def __init__(self, st):
        self.st = st
        self.processing = seeing()
        self.tokenizer = self.processing.tokenizer
        self.module = rm = model.load_reward(untrained(self.tokenizer), new=True)
        torch.nn.init.normal_(rm.score.weight)
        self.apply, self.params = st.bind(rm)
        scored = partial(st.score, self.apply, self.params, fields=("score",))
        reading = reward.Reading(self.tokenizer, processing=self.processing)
        self.score = reward.weighted(
            model=(reward.scalar(scored, rm.heads, reading=reading), 1.0), sizes=(sizes, 1.0)
        )
        self.prompts = asked(self.processing)
        self.rollout = answered(self.prompts, self.tokenizer)


def on_ranks(rank, world=1):
    st = get_fake_strategy()
    if world > 1:
        st = get_strategy(StrategyConfig())
    assert st.world == world
    it = Alone(st)
    judged = collect.gather_and_judge(st, it.score, it.rollout, it.prompts, it.tokenizer)
    checked = collect.check_reward(st, it.score, it.prompts[:2], tokenizer=it.tokenizer)
    return {"parts": judged.parts, "reward": judged.reward, "checked": checked["answer"].parts}


@pytest.fixture(scope="module")
def alone():
    return on_ranks(0)


def test_a_model_that_sees_gives_each_row_the_score_of_that_row_alone(alone):
    it = Alone(get_fake_strategy())
    want = []
    for i, p in enumerate(it.prompts):
        for j in range(G):
            k = G * i + j
            exp = packing.scored([it.rollout.tokens[k, : it.rollout.length[k]].tolist()])
            exp = tree.replace(exp, media=Media.of_prompts([p.media]))
            out = it.st.score(it.apply, it.params, exp, 512, fields=("score",)).score
            want.append(model.final_scores(out, exp.mask)[0, 0])
    got = alone["parts"]["model"]
    torch.testing.assert_close(got, torch.stack(want).view(N, G), atol=1e-5, rtol=0)

    # prompts of the same words differ by what is seen
    words = {}
    for p, x in zip(it.prompts, got[:, 2].tolist(), strict=True):
        words.setdefault(tuple(p.ids), []).append(x)
    same = [xs for xs in words.values() if len(xs) > 1]
    assert same and all(max(xs) - min(xs) > 1e-2 for xs in same)


def test_a_response_that_ends_in_a_placeholder_ends_as_others_do(alone):
    """The placeholder of an image ends a response that samples it, and asks for no third image."""
    it = Alone(get_fake_strategy())
    ends = it.rollout.length - 1
    place = it.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert place in it.tokenizer.all_special_ids
    tokens = it.rollout.tokens.scatter(1, ends[:, None], place)
    judged = reward.judge(it.score, tree.replace(it.rollout, tokens=tokens), it.prompts, it.tokenizer)
    torch.testing.assert_close(judged.parts["model"], alone["parts"]["model"])


def test_two_ranks_have_the_rewards_of_one_process(alone):
    both = ranks.run(2, "test_rewards_of_media:on_ranks", 2)
    for name in ("model", "sizes"):
        torch.testing.assert_close(both[0]["parts"][name], alone["parts"][name], atol=1e-5, rtol=0)
        assert both[0]["parts"][name].equal(both[1]["parts"][name])
        torch.testing.assert_close(both[1]["checked"][name], alone["checked"][name], atol=1e-5, rtol=0)
    assert both[0]["reward"].equal(both[1]["reward"])


def test_the_check_before_a_run_shows_the_media(alone):
    """The reference as a response is scored as a response that says it."""
    for name in ("model", "sizes"):
        want = alone["parts"][name][:2, 0]
        torch.testing.assert_close(alone["checked"][name], want, atol=1e-5, rtol=0)
    assert (alone["checked"]["sizes"] > 0).all()


def test_a_server_gets_both_images_of_each_prompt_each_once():
    processing = seeing()
    prompts = asked(processing)
    rollout = answered(prompts, processing.tokenizer)
    with hosting([rewards(len)]) as [host]:
        score = reward.weighted(r=(reward.served_at(host.url, deadline=9), 1.0))
        judged = reward.judge(score, rollout, prompts, processing.tokenizer)
        body = host.seen[0][2]
    assert judged.reward.tolist() == [[1.0] * G] * N
    assert len(body["files"]) == 2 * N and "images" not in body["columns"]
    got = wire.read_request(json.dumps(body).encode()).given["media"]
    files = [[base64.b64decode(x.split(",")[1]) for x in json.loads(p.columns["images"])] for p in prompts]
    assert [[x["bytes"] for x in row] for row in got] == [row for row in files for _ in range(G)]
    assert {(x["kind"], x["mime"]) for row in got for x in row} == {("image", "image/png")}


def test_a_model_and_a_judge_that_see_say_the_same_behind_a_server(alone, tmp_path):
    """The images come to them as they do in this process; the model is named by its folder."""
    from test_serving import serving  # skips where there is no server

    it = Alone(get_fake_strategy())
    model.save_reward(tmp_path, it.module, it.params)
    it.processing.processor.save_pretrained(tmp_path)
    ((fn, _),) = load_rewards([f"model:{tmp_path}"], options.Data(), it.st).components.values()

    engine = rft.engine.get_engine(None, untrained(it.tokenizer), it.tokenizer)
    how = {"form": forms.terse(), "sampling": Sampling(temperature=1.0, max_new=4), "unparsable": -1.0}
    judge = reward.generative(engine, it.tokenizer, processing=it.processing, patience=99, **how)
    batch = it.rollout, it.prompts, it.tokenizer
    with pytest.warns(UserWarning, match="expected answers with a verdict"):
        want = reward.judge(reward.weighted(judge=(judge, 1.0)), *batch, seed=3)
    with serving(model=(fn, 1.0), judge=(judge, 2.0)) as served:
        score = reward.weighted(r=(reward.served_at(f"{served.url}/score"), 1.0))
        got = reward.judge(score, *batch, seed=3)
    local = alone["parts"]["model"] + 2 * want.parts["judge"]
    torch.testing.assert_close(got.reward, local, atol=1e-5, rtol=0)
    assert got.extra["r/judge/said"] == want.extra["judge/said"] and len(set(want.extra["judge/said"])) > 9


# ------------------------------------------------------------------------------------------ a judge


def test_a_judge_in_an_engine_of_transformers_sees_both_images():
    """Its log-probs are those of the model for the question with the images of the prompt, in their order."""
    processing = seeing()
    tokenizer = processing.tokenizer
    lm = untrained(tokenizer)
    st = get_fake_strategy()
    sampling = Sampling(temperature=1.0, max_new=4)
    apply, params = st.bind(lm, sampling=sampling)
    engine = rft.engine.get_engine(None, untrained(tokenizer), tokenizer)
    kept = []

    def generate(*given, **more):
        kept.append(engine.generate(*given, **more))
        return kept[-1]

    how = {"form": forms.terse(), "sampling": sampling, "processing": processing, "unparsable": -1.0}
    fn = reward.generative(engine._replace(generate=generate), tokenizer, **how)
    prompts = asked(processing)
    rollout = answered(prompts, tokenizer)
    score = reward.weighted(judge=(fn, 1.0))
    with pytest.warns(UserWarning, match="expected answers with a verdict"):
        judged = collect.gather_and_judge(st, score, rollout, prompts, tokenizer)
    assert judged.metrics["judge/too_long"].sum() == 0 and len(judged.extra["judge/said"]) == G * N

    said = kept[0]
    want = torch.cat([p.media["pixel_values"] for p in prompts for _ in range(G)])
    assert said.media.count("image_grid_thw").tolist() == [2] * G * N
    torch.testing.assert_close(said.media.sequences()["pixel_values"], want)

    # with the media of other prompts it would have said something else
    none = torch.zeros(said.tokens.shape)
    exp = rft.experience(said, adv=none, w=none)
    logp = st.score(apply, params, exp, 1024).logp
    torch.testing.assert_close(logp[said.mask], said.logp[said.mask], atol=1e-4, rtol=0)
    swapped = Media.of_prompts([p.media for p in reversed(prompts)], G)
    other = st.score(apply, params, tree.replace(exp, media=swapped), 1024).logp
    assert (other - logp)[said.mask].abs().max() > 1e-2
