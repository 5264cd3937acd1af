#!/bin/bash
# A trial of the package in a fresh Debian: `cargo xtask deb --try` runs it there, stage by stage.
set -eu

. /try/common.sh

# Lists what this system has of dibs.
left() { find / /run -xdev -iname '*dibs*' -not -path '/try/*' | grep .; }

install() {
    export DEBIAN_FRONTEND=noninteractive
    left && fail "this system is not fresh"
    apt-get -qq update
    apt-get -qq install --yes /try/dibs.deb
    say "installed $(dpkg-query --show dibs) with $(dpkg-query --show --showformat='${Depends}' dibs)"
    getent group dibs >/dev/null || fail "there is no group dibs"
    local file
    for file in /usr/share/man/man1/dibsctl-enable.1.gz /usr/share/man/man8/dibsd.8.gz /usr/share/man/man5/dibsd.toml.5.gz \
        /usr/share/bash-completion/completions/dibsctl /usr/share/doc/dibs/copyright \
        /usr/share/doc/dibs/examples/host-a.toml /usr/lib/systemd/system/dibsd.service \
        /usr/lib/sysusers.d/dibs.conf /usr/lib/modules-load.d/dibs.conf \
        /etc/NetworkManager/conf.d/dibs.conf /etc/systemd/networkd.conf.d/dibs.conf; do
        [ -e "$file" ] || fail "$file is missing"
    done
    dibsctl check /usr/share/doc/dibs/examples/host-a.toml >/dev/null
}

# On host $1, a network namespace.
on() { ip netns exec "$@"; }

answers() { on "$1" dibsctl --socket "$2" peer list >/dev/null 2>&1; }
listens() { on b cat /proc/net/tcp | grep -q ':1B58 .* 0A '; }
established() { on "$1" dibsctl --socket "$2" --json peer list | grep -q '"state": "established"'; }
is_on() { on a dibsctl --json conn list | grep -q "\"bump\": \"$1\""; }

# Whether what is said into the connection comes back.
echoes() {
    local heard
    echo "$1" >&3
    read -rt 120 heard <&4 && [ "$heard" = "$1" ]
}

# Two hosts of this one system; a is where a host has its files, b has others.
hosts() {
    local host number=1
    ip netns add a
    ip netns add b
    ip link add eth0 netns a type veth peer name eth0 netns b
    ip link add wlan0 netns a type veth peer name wlan0 netns b
    for host in a b; do
        ip -n $host link set lo up
        ip -n $host address add 10.0.1.$number/24 dev eth0
        ip -n $host address add 10.0.2.$number/24 dev wlan0
        ip -n $host link set eth0 up
        ip -n $host link set wlan0 up
        number=$((number + 1))
    done
}

# Starts the daemon of a host, as systemd would.
start() {
    local host=$1 config=$2 socket=$3
    mkdir -p /run/dibs
    # Not by a function, whose process would be another.
    ip netns exec "$host" dibsd --config "$config" 2>>"/try/$host.log" &
    pids[$host]=$!
    await "an answer of dibsd on $host" answers "$host" "$socket"
}

restart() {
    kill "${pids[$1]}"
    wait "${pids[$1]}" || true
    start "$@"
    [ "$(readlink "/proc/${pids[$1]}/exe")" = /usr/bin/dibsd ] || fail "that of $1 is no new daemon"
}

use() {
    declare -gA pids
    say "dibsctl demo"
    dibsctl demo

    say "two hosts, by dibsctl init"
    hosts
    local a=/etc/dibs/dibsd.toml b=/etc/dibs/b/dibsd.toml of_a of_b
    local socket_a=/run/dibs/dibsd.sock socket_b=/run/dibs/b.sock
    on a dibsctl init --trusted eth0 | tee /try/a.out
    of_a=$(sed -n 's/.*--peer //p' /try/a.out)
    on b dibsctl init --config $b --peer "$of_a" | tee /try/b.out
    of_b=$(sed -n 's/.*--peer //p' /try/b.out)
    on a dibsctl init --peer "$of_b"
    # They share a file system here; init gave b a state_dir of its own.
    sed -i 's|^\[daemon\]|&\ncontrol_socket = "/run/dibs/b.sock"|' $b
    start a $a $socket_a
    start b $b $socket_b
    await "the session" established a $socket_a
    await "the session" established b $socket_b

    say "a connection, on a bump"
    on b socat TCP-LISTEN:7000,reuseaddr PIPE &
    await "a listener" listens
    coproc client { on a socat - TCP:10.0.1.2:7000; }
    exec 3>&"${client[1]}" 4<&"${client[0]}"
    echoes plain || fail "the connection does not stand"
    on a dibsctl enable --dport 7000
    is_on seal || fail "the connection is not on the bump"
    echoes sealed || fail "the connection broke on the bump"

    say "an upgrade"
    echo '# mine' >>/etc/NetworkManager/conf.d/dibs.conf
    local before
    before=$(sha256sum $a)
    dpkg --install /try/later.deb
    [ "$before" = "$(sha256sum $a)" ] || fail "the configuration changed"
    grep -q '^# mine$' /etc/NetworkManager/conf.d/dibs.conf || fail "a conffile was replaced"
    kill -0 "${pids[a]}" || fail "the upgrade stopped the daemon, which nobody would start here"
    echoes upgraded || fail "the connection broke at the upgrade"
    restart a $a $socket_a
    restart b $b $socket_b
    await "the session" established a $socket_a
    is_on seal || fail "the connection lost its bump"
    echoes restarted || fail "the connection broke at the daemons' restart"

    say "removal"
    on a dpkg --remove dibs
    [ -z "$(on a iptables-save | grep DIBS)" ] || fail "a removal left rules in the kernel"
    echoes removed || fail "the connection broke at the removal"
    [ -e $a ] && [ -e /etc/NetworkManager/conf.d/dibs.conf ] || fail "a removal took the configuration"
    kill "${pids[a]}" "${pids[b]}"
    wait "${pids[a]}" "${pids[b]}" || true

    say "purge"
    dpkg --purge dibs
    left && fail "a purge left these"
    getent group dibs && fail "a purge left the group"
    say "nothing is left"
}

"$1"
