"""Building an index: ``build.build`` is the function behind ``sorl-index build``."""
