"""SO-GRPO with a trust region in one file of plain torch and transformers: read it from top to bottom.

A policy learns to search in MiniHop. The environment and the dialogue are those of ``sorl_env``; everything that makes
up the method is here, and ``tests/docs/test_so_grpo.py`` holds it to the library's own losses and weights. Start from a
policy that can already hold a dialogue. The first command imitates a scripted expert for about a minute; the second is
this file (about a minute, two CPU cores)::

    sorl-train --config off_policy --algo so_grpo --stage sft --run_dir runs/cold
    python docs/tutorials/so_grpo.py --model runs/cold/checkpoints/best/policy

Shapes: B trajectories, L tokens, T = L - 1 scored positions (position t scores token t + 1).
"""

import argparse
import asyncio
import math
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sorl_env import ToolUseEnv, load_task
from sorl_env.rollout import RolloutJob, RolloutSettings, SampledTurn, collect

QUESTIONS, GROUP = 4, 8  # a batch: 8 trajectories of each of 4 questions
EPOCHS, MINI_BATCH = 3, 8  # 12 optimizer steps on each batch, so that the later ones are far off-policy
CLIP = 0.2  # a ratio outside [1 - CLIP, 1 + CLIP] is clipped
MAX_GRAD_NORM = 1.0


class Sampler:
    """Draws turns for all trajectories that wait for one, in one batch; what ``sorl_env.rollout.collect`` asks for."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.waiting = model, tokenizer, []

    async def generate(self, session, token_ids, params):
        """One turn: the context's token ids in, the drawn ids and their log-probabilities out."""
        reply = asyncio.get_running_loop().create_future()
        self.waiting.append((list(token_ids), params, reply))
        if len(self.waiting) == 1:  # the first one lets the others ask, too, and then draws for all of them
            for _ in range(10):
                await asyncio.sleep(0)
            asked, self.waiting = self.waiting, []
            self.draw(asked)
        return await reply

    def release(self, session):
        """Nothing is kept between the turns of a trajectory."""

    @torch.no_grad()
    def draw(self, asked):
        """Draw token by token, contexts padded on the left, until each turn has its closing tag or is too long."""
        width, cache, running = max(len(context) for context, _, _ in asked), None, list(range(len(asked)))
        ids = torch.tensor([[0] * (width - len(context)) + context for context, _, _ in asked])
        seen = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context, _, _ in asked])
        places, turns = (seen.cumsum(1) - 1).clamp(min=0), [([], []) for _ in asked]
        while running:
            out = self.model(
                ids, attention_mask=seen, position_ids=places, past_key_values=cache, use_cache=True
            )
            log_p, cache = out.logits[:, -1].log_softmax(-1), out.past_key_values
            greedy = asked[0][1].temperature == 0
            drawn = log_p.argmax(-1, keepdim=True) if greedy else torch.multinomial(log_p.exp(), 1)
            for row in list(running):
                (tokens, log_probs), (_, params, reply) = turns[row], asked[row]
                tokens.append(int(drawn[row]))
                log_probs.append(float(log_p[row, tokens[-1]]))
                end = self.tokenizer.decode(tokens[-8:], skip_special_tokens=True)  # long enough for a tag
                why = "eos" if tokens[-1] == self.tokenizer.eos_token_id else None
                why = why or ("stop" if end.endswith(params.stop) else None)
                why = why or ("length" if len(tokens) == params.max_new_tokens else None)
                if why:
                    reply.set_result(SampledTurn(tokens, log_probs, why))
                    running.remove(row)
            ids, places = drawn, places[:, -1:] + 1
            seen = torch.cat([seen, torch.ones_like(drawn)], dim=1)


def play(env, model, tokenizer, jobs, temperature=1.0):
    """One ``Trajectory`` for each job: its tokens, which of them the policy drew, and its reward."""
    settings = RolloutSettings(temperature=temperature)
    found = asyncio.run(collect(env, tokenizer, Sampler(model, tokenizer), jobs, settings))
    assert not any(t.excluded for t in found), [t.error for t in found]  # MiniHop's search is never out
    return found


def to_batch(trajectories):
    """Token ids (B, L), the policy's tokens (B, T) bool, and advantages (B, T), from groups of GROUP rollouts."""
    pad = torch.nn.utils.rnn.pad_sequence
    token_ids = pad([torch.from_numpy(t.token_ids).long() for t in trajectories], batch_first=True)
    mask = pad([torch.from_numpy(t.action_mask) for t in trajectories], batch_first=True)[:, 1:]
    rewards = torch.tensor([t.reward for t in trajectories]).view(-1, GROUP)
    better = rewards - rewards.mean(1, keepdim=True)  # than the other answers to the same question
    return token_ids, mask, (better / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1) * mask


def token_log_probs(model, token_ids, mask):
    """Log-probabilities (B, T) of the policy's tokens, 0 elsewhere. Padding is on the right: nothing attends to it."""
    log_p = model(token_ids[:, :-1], use_cache=False).logits.log_softmax(-1)
    return log_p.gather(2, token_ids[:, 1:, None]).squeeze(2) * mask


def policy_loss(new, old, advantages, mask):
    """PPO's clipped loss with a ratio for each token (eq:GRPO_objective), and the size of its clipping bias."""
    ratio = (new - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    loss = -((surrogate * mask).sum(1) / mask.sum(1)).mean()  # mean over tokens, then over trajectories
    # clipped tokens have no gradient. What they would have contributed is the clipping bias C (eq:Cturn_def)
    clipped = ((advantages > 0) & (ratio > 1 + CLIP)) | ((advantages < 0) & (ratio < 1 - CLIP))
    bias = (ratio * advantages * clipped).detach()[mask]  # one value for each of the policy's tokens
    return loss, float(bias.square().mean().sqrt()), float((bias != 0).float().mean())


class TrustRegion:
    """Keeps the weights w near those that began the batch, w0: the mean token KL stays below ``limit``."""

    def __init__(self, model, limit):
        self.weights, self.limit = list(model.parameters()), limit
        self.scale, self.recent = 1.0, 0.0  # of the learning rate; the largest KL of recent batches

    def begin(self):
        """Copy w0 before the first optimizer step on a batch."""
        self.start, self.largest, self.moves = [w.detach().clone() for w in self.weights], 0.0, 0

    def inside(self, measure, old, mask):
        """Log-probabilities from ``measure()``, after moving w back towards w0 until they are near ``old``."""
        for move in range(6):
            new = measure()
            kl = float((new - old).detach()[mask].square().mean()) / 2
            self.largest = max(self.largest, kl)
            if kl <= self.limit:
                return new
            # the KL grows with the square of the distance, so this share of it leads to half of the limit
            share = math.sqrt(self.limit / 2 / kl) if move < 4 else 0.0
            self.scale *= min(max(share, 0.1), 0.7) if move == 0 else 1.0
            self.moves += 1
            with torch.no_grad():
                for w, w0 in zip(self.weights, self.start, strict=True):
                    w.copy_(torch.lerp(w0, w, share))
        raise FloatingPointError(f"the KL is {kl} at the weights that began the batch")

    def end(self):
        """After a batch: the learning rate recovers while the largest KL stays well inside."""
        self.recent = min(self.limit, max(self.largest, 0.7 * self.recent))
        if 0 < self.recent < self.limit / 2:
            self.scale = min(1.0, self.scale * min(1.5, math.sqrt(self.limit / 2 / self.recent)))


def update(model, optimizer, trust, trajectories, lr, delta):
    """All optimizer steps on one batch; yields the loss, bias, share clipped and normalizer of each."""
    token_ids, mask, advantages = to_batch(trajectories)
    with torch.no_grad():
        old = token_log_probs(model, token_ids, mask)
    trust.begin()
    for rows in (part for _ in range(EPOCHS) for part in torch.randperm(len(mask)).split(MINI_BATCH)):
        measure = partial(token_log_probs, model, token_ids[rows], mask[rows])
        new = trust.inside(measure, old[rows], mask[rows])
        loss, bias, clipped = policy_loss(new, old[rows], advantages[rows], mask[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trust.weights, MAX_GRAD_NORM)
        normalizer = delta / max(bias, delta)  # eq:GRPO_MC: the more was clipped, the shorter the step
        learns = bool(advantages[rows].any())  # otherwise Adam's momentum alone would move the weights
        for group in optimizer.param_groups:
            group["lr"] = lr * trust.scale * normalizer * learns
        optimizer.step()
        yield loss.item(), bias, clipped, normalizer
    with torch.no_grad():  # what the last step did is measured, too, on a quarter of the batch
        trust.inside(partial(token_log_probs, model, token_ids[::4], mask[::4]), old[::4], mask[::4])
    if advantages.any():
        trust.end()


def train(model, tokenizer, env, held_out, *, steps=12, lr=5e-4, delta=0.003, trust_kl=0.01, questions=64):
    """Train, and print what each step did; returns success on held-out questions before and after."""
    optimizer, trust = torch.optim.AdamW(model.parameters(), weight_decay=0.0), TrustRegion(model, trust_kl)

    def evaluate():
        jobs = [RolloutJob(f"e{i}", f"e{i}", i, seed=i) for i in range(questions)]
        return sum(t.reward == 1 for t in play(held_out, model, tokenizer, jobs, temperature=0.0)) / questions

    success = [evaluate()]
    order = torch.randperm(len(env.examples)).tolist()
    print(f"before training: {success[0]:.3f} of {questions} held-out questions")
    for step in range(1, steps + 1):
        asked = [order[(step * QUESTIONS + i) % len(order)] for i in range(QUESTIONS)]
        batch = play(
            env, model, tokenizer, [RolloutJob(f"{q}-{g}", f"{q}", q, g) for q in asked for g in range(GROUP)]
        )
        figures = list(update(model, optimizer, trust, batch, lr, delta))
        _, bias, clipped, normalizer = (sum(column) / len(column) for column in zip(*figures, strict=True))
        reward = sum(t.reward for t in batch) / len(batch)
        print(
            f"step {step:2}: reward {reward:.2f}, clipped {clipped:.2%}, bias {bias:.3f}, normalizer {normalizer:.2f}, "
            f"largest KL {trust.largest:.4f}, moved back {trust.moves} times, rate x {trust.scale:.2f}"
        )
    success.append(evaluate())
    print(f"after training: {success[1]:.3f}")
    return success


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SO-GRPO with a trust region on MiniHop")
    parser.add_argument("--model", required=True, help="folder of a transformers model that plays MiniHop")
    parser.add_argument("--steps", type=int, default=12, help="training steps, each with a batch of rollouts")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate before it is scaled")
    parser.add_argument(
        "--delta", type=float, default=0.003, help="bias that shortens a step; 1e9: none does"
    )
    parser.add_argument("--trust_kl", type=float, default=0.01, help="limit of the trust region; 1e9: none")
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    torch.manual_seed(given.pop("seed"))
    torch.set_num_threads(1)  # the same sums on any number of cores
    folder = given.pop("model")
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    envs = (ToolUseEnv(load_task("minihop"), split=split) for split in ("train", "test"))
    train(policy, AutoTokenizer.from_pretrained(folder), *envs, **given)
