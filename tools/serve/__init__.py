"""``sorl-serve``: a retrieval server with Search-R1's ``/retrieve`` protocol, its dialects, and MCP."""
