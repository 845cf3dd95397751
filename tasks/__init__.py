"""Tasks, one file each. A module here that defines ``TASK`` is found by its name; there is no list to add it to."""
