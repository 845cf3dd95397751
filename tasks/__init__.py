"""Tasks, one file each. A module here that defines ``TASK`` is found by its name; no list has to be changed."""
