"""PPO in the manner of CleanRL, with this project's trust region: the loop of a trainer that knows nothing of it.

The lines with ``region`` are all that the trust region takes. Its file, ``sorl_train/learner/trust_region.py``, needs
only torch; copy it into your project, or import it. One run (seconds), and both arms of the study over four decades of
learning rates (108 runs of about ten seconds; it goes on where it was stopped)::

    python docs/tutorials/trust_region_ppo.py --env_id CartPole-v1 --lr 0.1 --limit 0.1
    python docs/tutorials/trust_region_ppo.py --study runs/ppo.jsonl
"""

import argparse
import json
import math
from itertools import product
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from sorl_train.learner.trust_region import TrustRegion

GAE_LAMBDA, CLIP, MAX_GRAD_NORM, VALUE_COEF = 0.95, 0.2, 0.5, 0.5
ENVS, MINI_BATCHES = 16, 4
# by environment: environment steps, those of a batch in each copy, passes over it, gamma, and the rewards' unit
SETTINGS = {
    "CartPole-v1": {"steps": 50_000, "length": 32, "epochs": 4, "gamma": 0.99, "unit": 1.0, "entropy": 0.01},
    "Pendulum-v1": {"steps": 80_000, "length": 64, "epochs": 10, "gamma": 0.9, "unit": 10.0, "entropy": 0.0},
}
RATES = [3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
LIMIT, SEEDS = 0.1, 3


class Agent(nn.Module):
    """A policy and a value function, two small networks. Actions are categorical or, if continuous, normal."""

    def __init__(self, observations, actions):
        super().__init__()
        self.discrete = isinstance(actions, gym.spaces.Discrete)
        size = math.prod(observations.shape)
        self.actor = _network(size, actions.n if self.discrete else math.prod(actions.shape), 0.01)
        self.critic = _network(size, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(1 if self.discrete else math.prod(actions.shape)))

    def policy(self, observations):
        """The distribution of actions."""
        out = self.actor(observations)
        if self.discrete:
            return Categorical(logits=out, validate_args=False)
        return Independent(Normal(out, self.log_std.exp(), validate_args=False), 1, validate_args=False)


def _network(size, outputs, gain):
    layers = [nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, scale in ((layers[0], math.sqrt(2)), (layers[2], math.sqrt(2)), (layers[4], gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def train(env_id, lr, limit=None, seed=0, steps=None):
    """Train; returns the mean return over the last tenth of the steps, and what the trust region did."""
    args = SETTINGS[env_id]
    length, iterations = args["length"], (steps or args["steps"]) // (ENVS * args["length"])
    torch.manual_seed(seed)
    shuffle = np.random.default_rng(seed)
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))] * ENVS,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    agent = Agent(envs.single_observation_space, envs.single_action_space)
    optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=1e-5)
    region = TrustRegion(optimizer, limit) if limit else None
    returns, moves, largest = [], 0, 0.0  # finished episodes; of the region, over all batches

    obs = torch.as_tensor(envs.reset(seed=seed)[0], dtype=torch.float32)
    for iteration in range(iterations):
        rollout = {name: [] for name in ("obs", "actions", "log_probs", "values", "rewards", "done")}
        for _ in range(length):
            with torch.no_grad():
                policy, value = agent.policy(obs), agent.critic(obs).squeeze(1)
                action = policy.sample()
            taken = action.numpy()
            if not agent.discrete:
                taken = taken.clip(-1, 1) * envs.single_action_space.high
            next_obs, reward, terminated, truncated, info = envs.step(taken)
            done = terminated | truncated
            if "final_info" in info:
                ended = info["final_info"]["episode"]["r"][done]
                returns += [(iteration, float(total)) for total in ended]
            found = (obs, action, policy.log_prob(action), value, reward / args["unit"], done)
            for kept, new in zip(rollout.values(), found, strict=True):
                kept.append(torch.as_tensor(new, dtype=None if new is action else torch.float32))
            obs = torch.as_tensor(next_obs, dtype=torch.float32)
        batch = {name: torch.stack(values) for name, values in rollout.items()}
        with torch.no_grad():
            following = torch.cat([batch["values"][1:], agent.critic(obs).T])
        advantages, last = torch.zeros_like(batch["rewards"]), 0.0
        for t in reversed(range(length)):
            alive = args["gamma"] * (1 - batch["done"][t])
            last = batch["rewards"][t] + alive * (following[t] + GAE_LAMBDA * last) - batch["values"][t]
            advantages[t] = last
        batch |= {"advantages": advantages, "returns": advantages + batch["values"]}
        batch = {name: values.flatten(0, 1) for name, values in batch.items()}

        def evaluate(rows, batch=batch):
            """The policy on rows of the batch, log-ratios to the one that began it, and their mean KL."""
            policy = agent.policy(batch["obs"][rows])
            log_ratio = policy.log_prob(batch["actions"][rows]) - batch["log_probs"][rows]
            return policy, log_ratio, log_ratio.detach().square().mean() / 2

        if region:
            region.begin()
        for _ in range(args["epochs"]):
            for rows in np.array_split(shuffle.permutation(ENVS * length), MINI_BATCHES):
                policy, log_ratio, kl = evaluate(rows)
                while region and region.step(kl):  # weights went back
                    policy, log_ratio, kl = evaluate(rows)
                ratio, advantage = log_ratio.exp(), batch["advantages"][rows]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
                error = agent.critic(batch["obs"][rows]).squeeze(1) - batch["returns"][rows]
                value_loss = error.square().mean() / 2
                loss = -surrogate.mean() + VALUE_COEF * value_loss - args["entropy"] * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                optimizer.step()
        with torch.no_grad():
            kl = evaluate(slice(None, None, 4))[2]
            while region and region.end(kl):
                kl = evaluate(slice(None, None, 4))[2]
        largest, moves = max(largest, float(kl)), moves + (region.moves if region else 0)
        if not all(p.isfinite().all() for p in agent.parameters()):
            break  # no action can be drawn any more
    envs.close()
    final = [total for at, total in returns if at >= int(0.9 * iterations)]
    return {
        "env_id": env_id,
        "lr": lr,
        "limit": limit,
        "seed": seed,
        "final": round(float(np.mean(final)), 1) if final else None,  # None: the weights became NaN
        "kl": round(largest, 5),  # the largest at a batch's end
        "moves": moves,
        "scale": round(region.scale, 8) if region else 1.0,
    }


def study(path):
    """All runs, a line each; those that the file has are not repeated."""
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    keys = {(run["env_id"], run["lr"], run["limit"], run["seed"]) for run in done}
    path.parent.mkdir(parents=True, exist_ok=True)
    for seed, env_id, lr, limit in product(range(SEEDS), SETTINGS, RATES, (None, LIMIT)):
        if (key := (env_id, lr, limit, seed)) not in keys:
            with path.open("a") as lines:
                lines.write(json.dumps(train(*key)) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO with and without a trust region")
    parser.add_argument("--env_id", choices=SETTINGS, default="CartPole-v1")
    parser.add_argument("--lr", type=float, default=3e-2)
    parser.add_argument("--limit", type=float, help="limit of the trust region, such as 0.1; none by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="environment steps")
    parser.add_argument(
        "--study", type=Path, metavar="FILE", help="do all runs of the study, and write them there"
    )
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    where = given.pop("study")
    print(json.dumps(train(**given))) if where is None else study(where)
