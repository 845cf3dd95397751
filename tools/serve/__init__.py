"""``sorl-serve``: a retrieval server that speaks Search-R1's ``/retrieve`` protocol."""
