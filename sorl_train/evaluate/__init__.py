"""Evaluation: policies on tasks in four modes, with intervals, tables and comparisons."""
