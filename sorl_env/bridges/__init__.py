"""Environments from elsewhere: Gymnasium's, and those of OpenEnv servers."""
