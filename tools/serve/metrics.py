"""Prometheus metrics of a server; those of several workers are added up."""

from __future__ import annotations

import logging
import os
from functools import partial

logger = logging.getLogger(__name__)

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

        self._prometheus = prometheus
        registry = self._registry = prometheus.CollectorRegistry()
        self.content_type: str = prometheus.CONTENT_TYPE_LATEST
        counter = partial(prometheus.Counter, registry=registry)
        gauge = partial(prometheus.Gauge, registry=registry, multiprocess_mode="livesum")
        seconds = partial(prometheus.Histogram, registry=registry, buckets=_SECONDS)
        sizes = partial(prometheus.Histogram, registry=registry, buckets=_SIZES)
        why_refused = "Connections closed because a client stalled, or there were too many"
        self.requests = counter("sorl_serve_requests", "Answers of /retrieve and /mcp by status", ["status"])
        self.refusals = counter("sorl_serve_refused_connections", why_refused, ["reason"])
        self.queries = counter("sorl_serve_queries", "Queries answered")
        self.latency_s = seconds("sorl_serve_request_seconds", "Time to answer a request")
        self.wait_s = seconds("sorl_serve_wait_seconds", "Longest wait of a request, for each batch")
        self.search_s = seconds("sorl_serve_search_seconds", "Time to search a batch")
        self.batch_size = sizes("sorl_serve_batch_queries", "Different queries in a batch")
        self.waiting = gauge("sorl_serve_waiting_queries", "Queries in the queue")
        self.failures = counter("sorl_serve_search_failures", "Batches whose search raised")
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            prometheus.ProcessCollector(registry=registry)
        self._logged: set[type[BaseException]] = set()

    def answered(self, status: int, num_queries: int, seconds: float) -> None:
        """Count one answer of ``/retrieve`` or ``/mcp``."""
        self.requests.labels(str(status)).inc()
        self.latency_s.observe(seconds)
        if status == 200:
            self.queries.inc(num_queries)

    def refused(self, reason: str) -> None:
        """Count a connection that was closed for a client's fault."""
        self.refusals.labels(reason).inc()

    def searched(self, num_queries: int, seconds: float) -> None:
        """Count one batch."""
        self.batch_size.observe(num_queries)
        self.search_s.observe(seconds)

    def failed(self, error: BaseException) -> None:
        """Count a batch whose search raised. Each type of error is logged once, with its traceback."""
        self.failures.inc()
        if type(error) not in self._logged:
            self._logged.add(type(error))
            logger.error("the search raised (logged once)", exc_info=error)

    def expose(self) -> bytes:
        """All metrics, in Prometheus's text format."""
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            from prometheus_client.multiprocess import MultiProcessCollector

            registry = self._prometheus.CollectorRegistry()
            MultiProcessCollector(registry)
        return self._prometheus.generate_latest(registry)
