"""What ``openrlhf.models.ring_attn_utils`` imports of it."""

from flash_attn import missing

all_gather = missing
