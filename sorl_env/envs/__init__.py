"""Environments as text, and their prompts as tokens."""
