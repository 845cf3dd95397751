"""A Ray cluster of two nodes on this machine.

It prints its address. A line ``kill`` on its standard input kills the second node, ``add`` starts another one; it ends
with its standard input.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

NODE = {"num_gpus": 2, "num_cpus": 10, "object_store_memory": 200_000_000}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    second = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
        else:
            second = cluster.add_node(**NODE)
            cluster.wait_for_nodes()
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
