"""Turn formats: a turn of the policy as text and as tokens."""
