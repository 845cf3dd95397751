"""The record of a rollout, and the classes of its tokens."""

from sorl_env.trajectory.trajectory import StopReason, Trajectory, Turn, iter_jsonl, read_jsonl, write_jsonl

__all__ = ["StopReason", "Trajectory", "Turn", "iter_jsonl", "read_jsonl", "write_jsonl"]
