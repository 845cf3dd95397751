"""Prometheus metrics of a server; with several workers they are summed over their processes."""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger(__name__)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The counters of one process.

    ``prometheus_client`` looks for ``PROMETHEUS_MULTIPROC_DIR`` when it is imported first, so that happens here and not
    at the top: the command line sets it when there are several workers.
    """

    def __init__(self) -> None:
        import prometheus_client as prometheus

        self._prometheus = prometheus
        registry = self._registry = prometheus.CollectorRegistry()
        self.content_type: str = prometheus.CONTENT_TYPE_LATEST
        self.requests = prometheus.Counter(
            "sorl_serve_requests", "Answers of /retrieve by status", ["status"], registry=registry
        )
        self.refusals = prometheus.Counter(
            "sorl_serve_refused_connections",
            "Connections ended because a client was too slow or sent too large a head",
            ["reason"],
            registry=registry,
        )
        self.queries = prometheus.Counter("sorl_serve_queries", "Queries answered", registry=registry)
        self.latency_s = prometheus.Histogram(
            "sorl_serve_request_seconds", "Time to answer a request", buckets=_SECONDS, registry=registry
        )
        self.wait_s = prometheus.Histogram(
            "sorl_serve_wait_seconds",
            "Longest wait for a batch, of each batch",
            buckets=_SECONDS,
            registry=registry,
        )
        self.search_s = prometheus.Histogram(
            "sorl_serve_search_seconds", "Time to search a batch", buckets=_SECONDS, registry=registry
        )
        self.batch_size = prometheus.Histogram(
            "sorl_serve_batch_queries", "Different queries in a batch", buckets=_SIZES, registry=registry
        )
        self.waiting = prometheus.Gauge(
            "sorl_serve_waiting_queries",
            "Queries in the queue",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.failures = prometheus.Counter(
            "sorl_serve_search_failures", "Batches whose search raised", registry=registry
        )
        self.in_flight = prometheus.Gauge(
            "sorl_serve_in_flight", "Requests in hand", registry=registry, multiprocess_mode="livesum"
        )
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            prometheus.ProcessCollector(registry=registry)
        self._logged: set[type[BaseException]] = set()
        self._by_status: dict[int, Any] = {}

    def answered(self, status: int, num_queries: int, seconds: float) -> None:
        """Count one answer of ``/retrieve``."""
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = self.requests.labels(str(status))
        counter.inc()
        self.latency_s.observe(seconds)
        if status == 200:
            self.queries.inc(num_queries)

    def refused(self, reason: str) -> None:
        """Count a connection that was ended for one of `connections.REFUSALS`."""
        self.refusals.labels(reason).inc()

    def searched(self, num_queries: int, seconds: float) -> None:
        """Count one batch."""
        self.batch_size.observe(num_queries)
        self.search_s.observe(seconds)

    def failed(self, error: Exception) -> None:
        """Count a batch whose search raised; each kind of error is logged once with its traceback."""
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
