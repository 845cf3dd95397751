"""Prometheus metrics of a server; those of several workers are added up."""

from __future__ import annotations

import os
from functools import partial

NUM_QUERIES = "sorl.queries"  # in a request's scope: how many queries were searched for it
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The counters of one process.

    ``prometheus_client`` reads ``PROMETHEUS_MULTIPROC_DIR`` when it is first imported. It is imported here and not at
    the top of the file, because the command sets that variable if there are several workers.
    """

    def __init__(self) -> None:
        import prometheus_client as prometheus
        from prometheus_client.multiprocess import MultiProcessCollector

        self.content_type: str = prometheus.CONTENT_TYPE_LATEST
        registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=registry)
        seconds = partial(prometheus.Histogram, registry=registry, buckets=_SECONDS)
        self.requests = counter("sorl_serve_requests", "Answers of /retrieve and /mcp by status", ["status"])
        self.queries = counter("sorl_serve_queries", "Queries answered")
        self.failures = counter("sorl_serve_search_failures", "Batches whose search raised")
        self.latency_s = seconds("sorl_serve_request_seconds", "Time to answer a request")
        self.search_s = seconds("sorl_serve_search_seconds", "Time to search a batch")
        self.batch_size = prometheus.Histogram(
            "sorl_serve_batch_queries", "Different queries in a batch", registry=registry, buckets=_SIZES
        )
        self.waiting = prometheus.Gauge(
            "sorl_serve_waiting_queries",
            "Queries in the queue",
            registry=registry,
            multiprocess_mode="livesum",
        )
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = prometheus.CollectorRegistry()
            MultiProcessCollector(registry)
        else:
            prometheus.ProcessCollector(registry=registry)
        self._expose = partial(prometheus.generate_latest, registry)

    def answered(self, status: int, num_queries: int, seconds: float) -> None:
        """Count one answer of ``/retrieve`` or ``/mcp``."""
        self.requests.labels(str(status)).inc()
        self.latency_s.observe(seconds)
        if status == 200:
            self.queries.inc(num_queries)

    def expose(self) -> bytes:
        """All metrics, in Prometheus's text format."""
        return self._expose()
