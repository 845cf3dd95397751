"""Training: losses, advantages, engines, evaluation, report. Importing the package loads nothing heavy."""
