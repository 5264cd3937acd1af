#!/bin/bash
# A trial of the package under a running systemd: `cargo xtask systemd` boots a Debian twice, and this runs in it as a unit.
# The first boot installs, switches, reloads, crashes, hangs and upgrades; the second one has the guard and no daemon yet, and leaves.
set -eu
stage=$(cat /try/stage)
exec >"/try/$stage.log" 2>&1
export PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive
. /try/common.sh

# Whatever it ends with, the machine goes off.
end() {
    local status=$?
    if [ $status = 0 ]; then
        echo ok >/try/result
    else
        journalctl --no-pager --lines 100 --unit dibsd --unit dibs-guard --unit other
    fi
    systemctl --no-block poweroff
}
trap end EXIT

on_b() { ip netns exec b "$@"; }
of_dibsd() { systemctl show --value --property "$1" dibsd; }
is_established() { dibsctl --json peer list 2>/dev/null | grep -q '"state": "established"'; }
is_on() { dibsctl --json conn list 2>/dev/null | grep -q "\"bump\": \"$1\""; }
listens() { on_b cat /proc/net/tcp | grep -q ":$1 .* 0A "; }
has_rule() { dibsctl --json rule list 2>/dev/null | grep -q "$1"; }
has_restarted() { [ "$(of_dibsd NRestarts)" = "$1" ] && [ "$(of_dibsd ActiveState)" = active ]; }
is_logged() { journalctl --unit dibsd "DIBS_EVENT=$1" --quiet --output cat | grep -q .; }

# Whether what is said into the connection comes back.
echoes() {
    local heard
    echo "$1" >&3
    read -rt 300 heard <&4 && [ "$heard" = "$1" ]
}

# The other host: a network namespace, at the far end of two links.
other_host() {
    local number=1 name
    ip netns add b
    on_b ip link set lo up
    for name in lan0 wlan0; do
        ip link add $name type veth peer name $name netns b
        ip address add 10.0.$number.1/24 dev $name
        on_b ip address add 10.0.$number.2/24 dev $name
        ip link set $name up
        on_b ip link set $name up
        number=$((number + 1))
    done
}

start_other() {
    # Nothing confines it: its network is another, and its files are this host's.
    systemd-run --quiet --unit other --property NetworkNamespacePath=/run/netns/b --property Type=notify \
        dibsd --config /etc/dibs/b/dibsd.toml
}

connect() {
    on_b socat TCP-LISTEN:"$1",reuseaddr,fork PIPE &
    await "a listener" listens "$(printf %04X "$1")"
    coproc client { socat - TCP:10.0.1.2:"$1"; }
    exec 3>&"${client[1]}" 4<&"${client[0]}"
}

first() {
    say "install"
    dpkg --install /try/dibs.deb
    [ "$(systemctl is-enabled dibsd || true)" = disabled ] || fail "the daemon is enabled without a configuration"
    systemd-analyze verify --man=no dibsd.service dibs-guard.service

    say "two hosts, by dibsctl init"
    other_host
    local of_a of_b
    dibsctl init --trusted lan0 >/try/a.out
    of_a=$(sed -n 's/.*--peer //p' /try/a.out)
    on_b dibsctl init --config /etc/dibs/b/dibsd.toml --peer "$of_a" >/try/b.out
    of_b=$(sed -n 's/.*--peer //p' /try/b.out)
    dibsctl init --peer "$of_b"
    sed -i 's|^\[daemon\]|&\ncontrol_socket = "/run/dibs-b.sock"|' /etc/dibs/b/dibsd.toml
    printf '\n[[rule]]\nbump = "seal"\nprotocol = "tcp"\ndport = 7100\n' >>/etc/dibs/dibsd.toml
    systemctl enable dibsd dibs-guard
    systemctl start dibs-guard dibsd
    [ "$(of_dibsd Type)/$(of_dibsd SubState)" = notify/running ] || fail "it does not run"
    [ -n "$(systemctl show --value --property WatchdogTimestamp dibsd)" ] || fail "it does not feed the watchdog"
    start_other
    await "the session" is_established

    say "a connection, on a bump"
    connect 7000
    echoes plain
    dibsctl enable --dport 7000
    is_on seal
    echoes sealed

    say "a unit as docs/guides.md has it"
    dibsctl disable --dport 7000
    is_on plain
    cat >/etc/systemd/system/backup.service <<'UNIT'
[Service]
Type=oneshot
ExecStartPre=dibsctl enable --dport 7000 --bump seal
ExecStart=/bin/sh -c 'dibsctl conn list >/try/during'
ExecStopPost=dibsctl disable --dport 7000
UNIT
    systemctl daemon-reload
    systemctl start backup
    grep -q seal /try/during || fail "the connection was not sealed during the backup"
    is_on plain
    echoes plain-again
    dibsctl enable --dport 7000
    is_on seal

    say "reload"
    printf '\n[[rule]]\nbump = "scramble"\nprotocol = "tcp"\ndport = 7200\n' >>/etc/dibs/dibsd.toml
    systemctl reload dibsd
    await "the new rule" has_rule 7200
    echoes reloaded

    say "crash"
    systemctl kill --signal KILL dibsd
    await "a new start" has_restarted 1
    await "the session" is_established
    await "the bump" is_on seal
    echoes crashed

    say "a daemon that hangs"
    systemctl kill --signal STOP dibsd
    await "a new start by the watchdog" has_restarted 2
    journalctl --unit dibsd --grep 'watchdog' --quiet --output cat | tail -2
    await "the session" is_established
    await "the bump" is_on seal
    echoes hung

    say "an upgrade"
    local before
    before=$(of_dibsd MainPID)
    dpkg --install /try/later.deb
    [ "$(of_dibsd ActiveState)" = active ] && [ "$(of_dibsd MainPID)" != "$before" ] || fail "it is no new daemon"
    await "the session" is_established
    await "the bump" is_on seal
    echoes upgraded

    say "the log"
    is_logged session_up || fail "the journal has no entry with fields of the session"
    is_logged enabled || fail "the journal has no entry with fields of the switch"
    # The next boot is to have the guard alone.
    systemctl disable dibsd
}

second() {
    say "the guard"
    [ "$(systemctl is-active dibs-guard)" = active ] || fail "the guard is not there"
    [ "$(of_dibsd ActiveState)" = inactive ] || fail "the daemon runs"
    local guard network
    guard=$(systemctl show --value --property ActiveEnterTimestampMonotonic dibs-guard)
    network=$(systemctl show --value --property ActiveEnterTimestampMonotonic network-pre.target)
    [ "$guard" -gt 0 ] && [ "$guard" -le "$network" ] || fail "the guard came after the network: $guard, $network"
    other_host
    on_b socat TCP-LISTEN:7100,reuseaddr,fork PIPE &
    on_b socat TCP-LISTEN:7000,reuseaddr,fork PIPE &
    await "a listener" listens 1BBC
    await "a listener" listens 1B58
    echo other | timeout 20 socat -T 5 - TCP:10.0.1.2:7000 | grep -q other || fail "the guard blocks what no rule names"
    ! echo secret | timeout 10 socat -T 5 - TCP:10.0.1.2:7100 || fail "what a rule puts on a bump left in plain"

    say "the daemon takes over"
    systemctl enable --now dibsd
    start_other
    await "the session" is_established
    coproc client { socat - TCP:10.0.1.2:7100; }
    exec 3>&"${client[1]}" 4<&"${client[0]}"
    echoes guarded
    is_on seal || fail "the connection is not on the bump"

    say "removal"
    dpkg --remove dibs
    ! systemctl is-active dibsd dibs-guard || fail "a removal left a unit"
    [ -z "$(iptables-save | grep DIBS)" ] || fail "a removal left rules in the kernel"
    echoes removed

    say "leave"
    dpkg --install /try/later.deb
    systemctl enable --now dibs-guard dibsd
    await "the session" is_established
    await "the bump" is_on seal
    echoes returned
    dibsctl leave
    echoes left
    systemctl disable --now dibsd dibs-guard
    ! systemctl is-failed dibsd dibs-guard || fail "a unit failed"
    [ "$(of_dibsd NRestarts)" = 0 ] || fail "the daemon was started again without a configuration"
    [ -z "$(iptables-save | grep DIBS)" ] || fail "it left rules in the kernel"
    [ ! -e /etc/dibs/dibsd.toml ] && [ ! -e /etc/dibs/private.key ] || fail "it left the configuration or the key"
    echoes done
    dpkg --purge dibs
    ! getent group dibs || fail "a purge left the group"
}

"$stage"
say "all as it should be"
