"""The train scripts once more, straight from the definitions: no packs, no masks, no weights, no engine.

A test runs a script and this on the same small model in float64, and compares every number that the script
logs. Rows are Python lists, every sequence has a separate forward, and sampling runs the whole prefix again
for each token. From the library come only the things that say *which* numbers are meant: keys, the generator
of a task and its verifier.
"""

import copy
import math

import ref
import torch

import rft_fn as rft
from rft_fn import rng

FAR = 1 << 40  # rows of a generator between one round of a step and the next


# ---------- the policy


def truncated(logits, temperature, top_p, keep=None):
    """log-probs [V] of the smallest set of tokens with mass top_p, and `keep`, at a temperature."""
    p = (logits / temperature).softmax(-1)
    order = p.argsort(descending=True, stable=True)
    before = p[order].cumsum(-1) - p[order]
    inside = {int(t) for t, b in zip(order, before) if b < top_p}
    if keep is not None:
        inside.add(int(keep))
    out = torch.full_like(logits, -math.inf)
    index = torch.tensor(sorted(inside))
    out[index] = (logits / temperature)[index].log_softmax(-1)
    return out


def logits_of(lm, tokens):
    """[S, V] of one sequence alone."""
    return lm(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def sample(lm, ids, key, *, temperature, top_p, max_new, stop):
    """(tokens, their log-probs, whether max_new ended it): D uniform numbers per token, for D choices."""
    u = None
    tokens, logps = [], []
    for t in range(max_new):
        with torch.no_grad():
            z = logits_of(lm, [*ids, *tokens])[-1]
        if u is None:
            size = (max_new, math.ceil(math.log2(len(z))))
            u = torch.rand(size, generator=rng.generator(key), dtype=torch.float64)
        if temperature == 0:
            logp = z.log_softmax(-1)
            token = int(z.argmax())
        else:
            logp = truncated(z, temperature, top_p)
            token, _ = ref.drawn(logp.exp().numpy(), u[t].numpy())
        tokens.append(token)
        logps.append(float(logp[token]))
        if token == stop:
            return tokens, logps, False
    return tokens, logps, True


def scores(lm, row, *, temperature, top_p):
    """(log-prob, entropy) of each token of a response, with gradient."""
    prompt = len(row["ids"])
    z = logits_of(lm, [*row["ids"], *row["tokens"]])
    logps, entropies = [], []
    for t, token in enumerate(row["tokens"]):
        logp = truncated(z[prompt + t - 1], temperature, top_p, keep=token)
        inside = logp > -math.inf
        logps.append(logp[token])
        entropies.append(-(logp[inside].exp() * logp[inside]).sum())
    return torch.stack(logps), torch.stack(entropies)


def expert_balance(lm, row, experts, k):
    """(balance of each token of a response, with gradient; the largest share of an expert): the routers of a
    Qwen3-MoE read every token but the last."""
    tokens, heard = [*row["ids"], *row["tokens"]], []
    gates = [layer.mlp.gate for layer in lm.model.layers]
    handles = [gate.register_forward_hook(lambda _, __, out: heard.append(out[0][:-1])) for gate in gates]
    logits_of(lm, tokens)
    for handle in handles:
        handle.remove()
    balances, largest = 0.0, 0.0
    for logits in heard:
        chosen = logits.topk(k).indices.flatten().tolist()
        share = torch.tensor([chosen.count(e) / len(chosen) for e in range(experts)])
        balances = balances + experts * (logits.softmax(-1) * share).sum(-1) / len(heard)
        largest = max(largest, float(share.max()))
    return balances[len(row["ids"]) - 1 :], largest


# ---------- the optimizer


class AdamW:
    """AdamW on parameters by name, with clipping by the global norm before it and an average after it."""

    def __init__(self, lm, cfg, ema=0.0, eps=1e-8):
        self.params = dict(lm.named_parameters())
        self.m = {n: torch.zeros_like(p) for n, p in self.params.items()}
        self.v = {n: torch.zeros_like(p) for n, p in self.params.items()}
        self.average = {n: p.detach().clone() for n, p in self.params.items()}
        self.count, self.b1, self.b2, self.eps = 0, cfg.beta1, cfg.beta2, eps
        self.weight_decay, self.max_norm, self.ema = cfg.weight_decay, cfg.max_norm, ema

    @torch.no_grad()
    def step(self, grads, lr):
        """The norm of the gradients before they are clipped."""
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
        scale = min(1.0, self.max_norm / max(norm, 1e-30))
        self.count += 1
        for n, p in self.params.items():
            g = grads[n] * scale
            self.m[n] = self.b1 * self.m[n] + (1 - self.b1) * g
            self.v[n] = self.b2 * self.v[n] + (1 - self.b2) * g * g
            m_hat = self.m[n] / (1 - self.b1**self.count)
            v_hat = self.v[n] / (1 - self.b2**self.count)
            decay = self.weight_decay * p if p.dim() >= 2 else 0
            p -= lr * (m_hat / (v_hat.sqrt() + self.eps) + decay)
            self.average[n] = self.ema * self.average[n] + (1 - self.ema) * p
        return norm


def rate(cfg, lr, warmup, total, done):
    """Of the update after `done` ones: a line up to lr, then a line or half a cosine down to lr_end lr."""
    if done < warmup:
        return lr * (done + 1) / warmup
    if cfg.schedule == "constant":
        return lr
    x = min((done - warmup) / max(total - warmup, 1), 1.0)
    height = 1 - x if cfg.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * x))
    return lr * (cfg.lr_end + (1 - cfg.lr_end) * height)


def gradients(lm, total):
    names, params = zip(*lm.named_parameters())
    found = torch.autograd.grad(total, params, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, params, found)}


# ---------- small things


def mean(xs):
    xs = list(xs)
    return sum(xs) / len(xs)


def std(xs, correction=0):
    xs = list(xs)
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - correction))


def spread(name, xs):
    """The four statistics of numbers that are logged."""
    return {f"{name}/mean": mean(xs), f"{name}/std": std(xs), f"{name}/min": min(xs), f"{name}/max": max(xs)}


def float32(x):
    """A reward as it is stored."""
    return float(torch.tensor(x, dtype=torch.float32))


def kl_estimate(a, b):
    """k3 of log-probs of samples of the first: exp(b - a) - 1 + a - b."""
    return math.exp(b - a) - 1 + a - b


def distances(ratios):
    """How far the policy is from what sampled, by the ratios of the sampled tokens."""
    return {
        "policy/k1_sampler": -mean(math.log(r) for r in ratios),
        "policy/chi2_sampler": mean(r * r - 1 for r in ratios),
        "policy/ess_sampler": sum(ratios) ** 2 / len(ratios) / sum(r * r for r in ratios),
    }


class Moments:
    """The mean and the deviation of all numbers so far, kept as all of them."""

    def __init__(self):
        self.seen = []

    def normalised(self, xs):
        self.seen += xs
        spread = std(self.seen, correction=1) if len(self.seen) > 1 else 0.0
        scale = spread + 1e-8 if spread > 1e-12 * abs(mean(self.seen)) else 1.0
        return [(x - mean(self.seen)) / scale for x in xs]


class Task:
    """Prompts of a built-in task and the score of an answer."""

    def __init__(self, name, level, tokenizer, template):
        self.task, self.level, self.tokenizer = rft.data.tasks.get_task(name), level, tokenizer
        self.template, self.name = template, name

    def prompt(self, seed, index):
        row = self.task.generate(seed, index, self.level)
        return {"ids": self.tokenizer.encode(self.template.format(**row)), "row": row, "index": index}

    def score(self, prompt, tokens):
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return float32(self.task.verify(text, prompt["row"]))


def drawn(task, n, step, seed, round=0):
    """The prompts of a step, each with its key."""
    key = rng.fold_in(seed, "round", round) if round else seed
    out = []
    for i in range(step * n, (step + 1) * n):
        prompt = task.prompt(seed, i + round * FAR)
        out.append((prompt, rng.fold_in(key, step, prompt["index"])))
    return out


def evaluation(lm, task, cfg, stop):
    """The mean score of greedy answers to questions of the next seed."""
    found = []
    for i in range(cfg.eval_prompts):
        prompt = task.prompt(cfg.seed + 1, i)
        tokens, _, _ = sample(lm, prompt["ids"], 0, temperature=0, top_p=1, max_new=cfg.max_new, stop=stop)
        found.append(task.score(prompt, tokens))
    return {"eval/mean": mean(found), f"eval/task:{task.name}": mean(found)}


def sampled_groups(lm, task, cfg, drawn_prompts, stop):
    """Groups of rows: each prompt's samples with their rewards."""
    groups = []
    for prompt, key in drawn_prompts:
        rows = []
        for j in range(cfg.group):
            how = {"temperature": cfg.temperature, "top_p": cfg.top_p, "max_new": cfg.max_new, "stop": stop}
            tokens, logp, truncated_ = sample(lm, prompt["ids"], rng.fold_in(key, j), **how)
            row = {"ids": prompt["ids"], "tokens": tokens, "logp": logp, "truncated": truncated_}
            rows.append(row | {"raw": task.score(prompt, tokens)})
        groups.append(rows)
    return groups


def differs(rows):
    return max(r["raw"] for r in rows) > min(r["raw"] for r in rows)


def filled(lm, task, cfg, step, stop):
    """Groups whose rewards differ, from as many rounds as it takes; the metrics of that."""
    groups, varied, rounds = [], 0, 0
    for i in range(cfg.rounds):
        new = sampled_groups(lm, task, cfg, drawn(task, cfg.prompts, step, cfg.seed, i), stop)
        groups += new
        varied += sum(map(differs, new))
        rounds += 1
        if varied >= cfg.prompts:
            break
    first = groups  # of one round as they were drawn
    if rounds > 1:
        first = [g for g in groups if differs(g)] + [g for g in groups if not differs(g)]
    metrics = {"sampling/rounds": rounds, "sampling/varied": varied / len(groups)}
    return first[: cfg.prompts], metrics


def rollout_metrics(groups, rewards):
    """Of rows of groups, and the rewards [N][G] that advantages are made of."""
    rows = [r for g in groups for r in g]
    flat = [r for g in rewards for r in g]
    sizes = [len(r["tokens"]) for r in rows]
    return {
        "reward/std": std(flat),
        "reward/flat_groups": mean(max(g) == min(g) for g in rewards),
        "rollout/length_mean": mean(sizes),
        "rollout/length_max": max(sizes),
        "rollout/truncated": mean(r["truncated"] for r in rows),
        "rollout/empty": mean(n <= 1 for n in sizes),
        "rollout/sampler_logp": sum(sum(r["logp"]) for r in rows) / sum(sizes),
    }


def clipped_loss(logp, old, adv, low, high, dual=None):
    """(loss, whether its gradient is stopped) of one token."""
    rho = (logp - old).exp()
    value = float(rho.detach())
    bounded = min(max(value, 1 - low), 1 + high)
    unclipped, clipped = value * adv, bounded * adv
    stopped = (value > 1 + high and adv > 0) or (value < 1 - low and adv < 0)
    still = logp.detach() * 0  # a loss without gradient
    loss = -rho * adv if unclipped <= clipped else still - bounded * adv
    if dual is not None and adv < 0 and float(loss.detach()) > -dual * adv:
        loss, stopped = still - dual * adv, True
    return loss, stopped


def averaged(updates):
    """The mean over the updates of a step of every metric that they have."""
    names = dict.fromkeys(name for u in updates for name in u)
    return {name: mean(u[name] for u in updates if name in u) for name in names}


@torch.no_grad()
def move(ref, lm, share):
    """Move a reference to a policy by a share of the way."""
    for old, new in zip(ref.parameters(), lm.parameters(), strict=True):
        old.copy_((1 - share) * old + share * new)


def copy_of(lm):
    return copy.deepcopy(lm).requires_grad_(False)
