"""A Ray cluster of two nodes on this machine, each with as many pretended GPUs as the argument says.

It prints its address. A line ``kill`` on its standard input kills the second node, ``add`` starts another one; it ends
with its standard input.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    node = {"num_gpus": int(sys.argv[1]), "num_cpus": 10, "object_store_memory": 200_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    second = cluster.add_node(**node)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
        else:
            second = cluster.add_node(**node)
            cluster.wait_for_nodes()
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
