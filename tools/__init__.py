"""Tools: search over a corpus or a retrieval server, and a calculator."""
