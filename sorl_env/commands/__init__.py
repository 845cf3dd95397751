"""The commands sorl-check-task and sorl-play, and what all commands share."""
