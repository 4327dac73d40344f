#!/usr/bin/env bash
# Run a script under torchrun on an emulated cluster: network namespaces as nodes, joined by a bridge, each node's link
# limited. Needs root and iproute2 on Linux. The namespaces are this call's own and are removed when it ends.
#
#   scripts/emulated_cluster.sh NODES RANKS_PER_NODE MBIT_PER_S SCRIPT.py [ARGS]     # 0 Mbit/s: no limit
#
# Inside a node ranks talk at memory speed; between nodes at MBIT_PER_S per node, up and down.
set -euo pipefail

if [ $# -lt 4 ]; then
    sed -n '2,7s/^# \?//p' "$0"
    exit 2
fi
nodes=$1 ranks=$2 rate=$3
shift 3
if [ "$(id -u)" != 0 ] || ! command -v ip >/dev/null || ! command -v tc >/dev/null; then
    echo "emulated_cluster.sh needs root and iproute2 (ip, tc)" >&2
    exit 2
fi

prefix=alpa$$ switch=alpa$$sw
remove() {
    for name in $(ip netns list | awk '{print $1}' | grep -E "^(${prefix}n[0-9]+|${switch})$" || true); do
        ip netns del "$name"
    done
}
trap remove EXIT
trap 'exit 130' INT TERM

limit() { # namespace device: small segments, so that the bucket never sees more than its burst
    ip -n "$1" link set "$2" gso_max_size 16000 gro_max_size 16000 2>/dev/null || true
    tc -n "$1" qdisc add dev "$2" root tbf rate "${rate}mbit" burst 64kb latency 40ms
}

ip netns add "$switch"
ip -n "$switch" link add br0 type bridge
ip -n "$switch" link set br0 up
for ((i = 0; i < nodes; i++)); do
    node=${prefix}n$i
    ip netns add "$node"
    ip -n "$node" link set lo up
    ip -n "$node" link add eth0 type veth peer name "p$i" netns "$switch"
    ip -n "$switch" link set "p$i" master br0 up
    if [ "$rate" != 0 ]; then
        limit "$node" eth0
        limit "$switch" "p$i"
    fi
    ip -n "$node" addr add "10.77.0.$((i + 1))/24" dev eth0
    ip -n "$node" link set eth0 up
done

pids=()
for ((i = 0; i < nodes; i++)); do
    ip netns exec "${prefix}n$i" env GLOO_SOCKET_IFNAME=eth0 TP_SOCKET_IFNAME=eth0 "${PYTHON:-python}" -m torch.distributed.run \
        --nnodes "$nodes" --nproc-per-node "$ranks" --node-rank "$i" --master-addr 10.77.0.1 --master-port 29400 \
        "$@" > >(sed -u "s/^/[$i] /") 2>&1 &
    pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
done
exit $failed
