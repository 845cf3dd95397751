"""Tasks. A module here that defines ``TASK`` is found by its name; no list has to be changed.

Except for MiniHop, which generates its world, each task takes real questions from ``data=`` (a file, a folder, or
``hf:`` for the task's own data set on the Hugging Face hub where it names one) and real passages from ``corpus=`` or
``search_url=``. Without them it uses a small sample that was written for this project, and a warning says so.
"""
