"""Tools: search in a corpus or through a retrieval server, and a calculator."""
