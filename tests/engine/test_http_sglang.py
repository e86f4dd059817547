"""What we ask SGLang's server, and what we read of its answers, against the package's own types.

Nothing here ran on SGLang itself, which needs a GPU. What hostile servers answer is at the end, vLLM's too.
"""

import ast
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest
from each_case import each
from test_http import answering, raw

import rft_fn as rft
from rft_fn import model
from rft_fn.engine import adapters_alone, openai, sglang
from rft_fn.engine.engine_groups import TorchGroups
from rft_fn.engine.server_protocol import Ask, Client, Described, Fault, check_reply
from rft_fn.model import lora_alone
from rft_fn.types import Sampling

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("SGLANG_TYPES", ROOT / ".venv" / "sglang"))
KNOWN = Described("/generate", "tiny", None, "7", frozenset())
DIALECT = sglang._SGLang(Client(), 5.0)
ASKS = [
    Ask([3, 4, 5], 2**63 - 1, Sampling(), 7, [1]),
    Ask([3], 0, Sampling(temperature=0.0, stop=("x", 9)), 1, [1, 9]),
    Ask([3, 4], 5, Sampling(temperature=0.3, top_p=0.9), 256, []),
    Ask([3, 4], 5, Sampling(top_k=20), 256, [1]),
]


@pytest.fixture(scope="module")
def types():
    """The module of the package's types."""
    if not (FOLDER / "api_types.py").exists():
        pytest.skip(f"no types of SGLang in {FOLDER}: python tests/engine/sglang_types.py {FOLDER}")
    sys.path.append(str(FOLDER))  # msgspec
    spec = importlib.util.spec_from_file_location("sglang_api_types", FOLDER / "api_types.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(FOLDER))


@each("ask", ASKS)
def test_requests_pass_the_servers_own_gate(types, ask):
    body = json.loads(json.dumps(sglang.request(ask)))
    assert body.keys() <= set(types.GenerateRequest.__struct_fields__)  # others are skipped in silence
    found = types.GenerateRequest.from_json_value(body)
    assert found.input_ids == ask.prompt and found.return_logprob is True and found.logprob_start_len == -1
    given = found.sampling_params
    assert given.sampling_seed == ask.seed and given.max_new_tokens == ask.max_new and given.n == 1
    assert (given.temperature, given.top_p) == (ask.sampling.temperature, ask.sampling.top_p)
    assert given.top_k == (ask.sampling.top_k or -1)
    assert given.stop_token_ids == ask.ends and given.ignore_eos is True
    assert given.stop == ([x for x in ask.sampling.stop if isinstance(x, str)] or None)
    assert bool(found.return_sampling_mask) == ask.sampling.truncates


def test_adapters_are_named_as_the_server_reads_it(types):
    found = types.GenerateRequest.from_json_value(sglang.request(ASKS[0], "rft-a"))
    assert found.lora_path == "rft-a"
    assert types.GenerateRequest.from_json_value(sglang.request(ASKS[0])).lora_path is None


def test_the_gate_refuses_an_option_that_does_not_exist(types):
    """So the test above would see one."""
    body = sglang.request(ASKS[0])
    body["sampling_params"]["seed"] = 1
    with pytest.raises(types.JsonContractError, match="seed"):
        types.GenerateRequest.from_json_value(body)


def answer_of(types, **about):
    """An answer as the package writes it."""
    entries = [types.LogprobEntry(logprob=-0.5, token_id=8), types.LogprobEntry(logprob=-1.5, token_id=1)]
    about = {"finish_reason": types.FinishStop(matched=1), "weight_version": "7"} | about
    meta = types.GenerateMetaInfo(output_token_logprobs=entries, completion_tokens=2, **about)
    return types.GenerateResponse(text="", output_ids=[8, 1], meta_info=meta).to_json_value()


def sampled(answer, ask=ASKS[0]):
    with raw(answering(json.dumps(answer).encode())) as url:
        return DIALECT.sample(url, KNOWN, ask)


def test_answers_are_read_as_the_package_writes_them(types):
    answer = answer_of(types)
    assert sampled(answer)[:3] == ([8, 1], [-0.5, -1.5], "7")
    assert types.GenerateResponse.from_json_value(answer).output_ids == [8, 1]


def test_log_probs_of_a_cut_are_those_of_its_mask(types):
    answer = answer_of(types)
    with pytest.raises(Fault, match="expected output_ids and meta_info with log-probs"):
        sampled(answer, ASKS[2])
    answer["meta_info"]["output_token_sampling_logprobs"] = [-0.1, -0.2]
    assert sampled(answer, ASKS[2]).logp == [-0.1, -0.2]


def test_a_sample_that_was_broken_off_is_none(types):
    answer = answer_of(types, finish_reason=types.FinishAbort(message="mask too large"))
    with pytest.raises(Fault, match=r"expected a sample, got one that was broken off: .*mask too large"):
        sampled(answer)


def test_scores_are_read_as_the_package_writes_them(types):
    entries = [types.LogprobEntry(token_id=3), types.LogprobEntry(logprob=-2.0, token_id=4)]
    answer = answer_of(types, input_token_logprobs=entries)
    with raw(answering(json.dumps(answer).encode())) as url:
        assert DIALECT.score(url, KNOWN, [3, 4]) == [-2.0]
        with pytest.raises(Fault, match="expected input_token_logprobs"):
            DIALECT.score(url, KNOWN, [3, 5])


def fields_of(name):
    """The fields of a record in the package's source."""
    body = ast.parse((FOLDER / "io_struct.py").read_text()).body
    (found,) = [x for x in body if isinstance(x, ast.ClassDef) and x.name == name]
    return {x.target.id for x in found.body if isinstance(x, ast.AnnAssign)}


def test_paths_and_fields_of_the_other_requests(types, tmp_path):
    """Those that a fake server records."""
    import tiny
    import transfer_ends
    from fake_server import FakeServer, serving

    with serving(FakeServer(tiny.llama(), tiny.tokenizer(), transfer="torch")) as (fake,):
        DIALECT.describe(fake.url)
        DIALECT.score(fake.url, KNOWN, [3, 4])
        DIALECT.sleep(fake.url)
        DIALECT.wake(fake.url)
        pytest.importorskip("peft")
        st = rft.strategy.get_strategy()
        lm = model.apply_lora_configuration(tiny.llama(), 2, 4)
        state = st.init(lm, rft.optim.adamw(1e-3))[1]
        adapters_alone.write(tmp_path / "a", dict(lora_alone.AdaptersAlone(st.export(state))))
        DIALECT.load_adapter(fake.url, str(tmp_path / "a"), "rft-a")
        DIALECT.unload_adapter(fake.url, "rft-a")
        fake.load = lambda folder: 1
        DIALECT.load(fake.url, "/folder", "run:3", 1)
        groups = TorchGroups(Client(), 5.0)
        groups.send(fake.url, transfer_ends.parcel(5), "run:4")
        DIALECT.settle(fake.url, "run:4")
        groups.close()
    text = (FOLDER / "http_server.py").read_text()
    routes = set(re.findall(r'@app\.(?:get|post|api_route)\(\s*"([^"]+)"', text))
    assert {path for path, _ in fake.calls} <= routes
    kinds = {
        "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
        "/load_lora_adapter": "LoadLoRAAdapterReqInput",
        "/unload_lora_adapter": "UnloadLoRAAdapterReqInput",
        "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
        "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
        "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
        "/destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
        "/begin_weight_update": "BeginWeightUpdateReqInput",
        "/end_weight_update": "EndWeightUpdateReqInput",
        "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
        "/update_weight_version": "UpdateWeightVersionReqInput",
        "/pause_generation": "PauseGenerationReqInput",
        "/continue_generation": "ContinueGenerationReqInput",
    }
    asked = {path: set(body) for path, body in fake.calls if path in kinds}
    assert asked.keys() == kinds.keys()
    for path, fields in asked.items():
        assert fields <= fields_of(kinds[path]), path


# what the package's gate takes, for where it cannot be fetched
NAMES = (
    "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty "
    "presence_penalty repetition_penalty min_new_tokens n ignore_eos skip_special_tokens "
    "spaces_between_special_tokens no_stop_trim sampling_seed"
)
OPTIONS = set(NAMES.split())
FIELDS = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "return_sampling_mask"}


@each("ask", ASKS)
def test_requests_have_no_other_options_than_those_known(ask):
    body = sglang.request(ask)
    assert body.keys() <= FIELDS and body["sampling_params"].keys() <= OPTIONS


def test_the_known_options_are_the_packages(types):
    assert set(types.SamplingParams.__struct_fields__) >= OPTIONS
    assert set(types.GenerateRequest.__struct_fields__) >= FIELDS


VLLM = openai._VLLM(Client(), 5.0)
GENERATE, COMPLETIONS = (KNOWN._replace(route=x, label="") for x in (openai.GENERATE, openai.COMPLETIONS))


def plain_answer(tokens, logp):
    """An answer of SGLang by hand."""
    about = {"finish_reason": {"type": "length"}, "weight_version": "7"}
    about["output_token_logprobs"] = [[p, t, None] for p, t in zip(logp, tokens, strict=True)]
    return {"output_ids": tokens, "meta_info": about}


def generated(tokens, logp):
    """One of vLLM's better route."""
    content = [{"token_id": t, "logprob": p} for t, p in zip(tokens, logp, strict=True)]
    return {"choices": [{"token_ids": tokens, "logprobs": {"content": content}}]}


def completed(tokens, logp):
    """One of the OpenAI protocol."""
    return {"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": logp}}]}


FORMS = {
    "sglang": (DIALECT, KNOWN, plain_answer),
    "generate": (VLLM, GENERATE, generated),
    "completions": (VLLM, COMPLETIONS, completed),
}
HUGE = 10**400
TOKENS = [3.7, 3.0, "3", True, None, [3], {"3": 3}, HUGE, -1, 128]
LOGP = ["-1", True, None, [-1.0], HUGE, -HUGE, 0.5]


@pytest.mark.parametrize("form", FORMS)
def test_answers_that_are_no_sample_are_faults(form):
    dialect, known, make = FORMS[form]
    right = make([8, 1], [-0.5, -1.5])
    wrong = [make([8, x], [-0.5, -1.5]) for x in TOKENS] + [make([8, 1], [-0.5, x]) for x in LOGP]
    wrong += [None, [], 3, "x", {}, {"choices": []}, {"choices": 3, "meta_info": [], "output_ids": "83"}]
    wrong += [{"choices": [3]}, {"choices": [{"token_ids": "83"}]}, {"output_ids": [8, 1], "meta_info": 4}]

    def asked(answer):
        with raw(answering(json.dumps(answer).encode())) as url:
            reply = dialect.sample(url, known, ASKS[0])
        check_reply(reply, ASKS[0], vocabulary=128, label="7")
        return reply

    assert asked(right)[:2] == ([8, 1], [-0.5, -1.5])
    for answer in wrong:
        with pytest.raises(Fault) as found:
            asked(answer)
        assert len(str(found.value)) < 300, answer


@pytest.mark.parametrize("form", FORMS)
def test_scores_that_are_none_are_faults(form):
    dialect, known, _ = FORMS[form]

    def scored(row, count=2):
        rows = [[None, 3, None], *[[row, 4, None]] * (count - 1)]
        found = {"prompt_logprobs": [None, *[{"4": {"logprob": row}}] * (count - 1)]}
        answer = found | {"meta_info": {"input_token_logprobs": rows}, "choices": [found]}
        with raw(answering(json.dumps(answer).encode())) as url:
            return dialect.score(url, known, [3, 4])

    assert scored(-2) == [-2.0]
    for row in ["-2", True, None, [-2], HUGE]:
        with pytest.raises(Fault, match=r"^expected (input_token|prompt)_logprobs, got"):
            scored(row)
    with pytest.raises(Fault, match=r"^expected (input_token|prompt)_logprobs, got"):
        scored(-2, 3)


@pytest.mark.parametrize("dialect", [DIALECT, VLLM], ids=["sglang", "vllm"])
@pytest.mark.parametrize("window", ["128", 1.5, True, -4, [128]])
def test_a_window_that_is_none_is_a_fault(dialect, window):
    options = {"max_context_length": window, "weight_version": "7", "served_model_name": "tiny"}
    models = {"data": [{"id": "tiny", "max_model_len": window}]}
    with raw(answering(json.dumps(options | models).encode())) as url, pytest.raises(Fault, match=r"^max_"):
        dialect.describe(url)


@pytest.mark.parametrize("answer", [None, [], [3], {"results": [3]}, {"results": {"a": 1}}, {"data": 3}])
def test_every_other_answer_of_nonsense_is_a_fault(answer):
    """Whatever is asked; a server that cannot load samples and scores."""
    with raw(answering(json.dumps(answer).encode())) as url:
        for dialect in (DIALECT, VLLM):
            for ask in (
                lambda: dialect.describe(url),  # noqa: B023
                lambda: dialect.load(url, "/folder", "run:3", 1),  # noqa: B023
            ):
                with pytest.raises(Fault, match="expected"):
                    ask()
        for call in (VLLM.sleep, VLLM.wake):
            with pytest.raises(Fault, match="is_sleeping"):
                call(url)
