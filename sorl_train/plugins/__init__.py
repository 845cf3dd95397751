"""SO-PPO, SO-GRPO and the other algorithms of the table inside other trainers (docs/interop/plugins.md)."""
