use super::*;
use crate::{BumpRoute, ClassRule, DeviceName, DeviceOwner, Fail, Prefix};

fn bump(id: u8, device: &str, owner: DeviceOwner, peers: &[&str]) -> BumpRoute {
    BumpRoute {
        id: BumpId::new(id).unwrap(),
        device: DeviceName::new(device).unwrap(),
        owner,
        addresses: vec!["10.0.1.1".parse().unwrap(), "fd00::1".parse().unwrap()],
        peers: peers.iter().map(|peer| peer.parse().unwrap()).collect(),
    }
}

fn one() -> Desired {
    let mut rule = ClassRule::tcp(1, BumpId::new(1).unwrap());
    rule.dport = Some(80);
    Desired {
        bumps: vec![bump(1, "dibs1", DeviceOwner::Ours, &["10.0.1.2"])],
        rules: vec![rule],
        ..Desired::default()
    }
}

fn text(desired: &Desired) -> String {
    Plan::new(desired).unwrap().to_string()
}

#[test]
fn nothing_wanted_is_nothing_installed() {
    assert_eq!(text(&Desired::default()), "");
    assert!(Plan::new(&Desired::default()).unwrap().is_empty());
    let mut nobody = one();
    nobody.bumps[0].peers.clear();
    assert_eq!(text(&nobody), "");
}

#[test]
fn one_bump_one_rule() {
    let expected = "\
iptables-restore --noflush --wait <<EOF
*mangle
:DIBS-IN-1 - [0:0]
:DIBS-PREROUTING - [0:0]
:DIBS-POSTROUTING - [0:0]
-A DIBS-IN-1 -d 127.0.0.0/8 -j DROP
-A DIBS-IN-1 -m addrtype ! --dst-type LOCAL -j DROP
-A DIBS-IN-1 -p icmp -m icmp --icmp-type 5 -j DROP
-A DIBS-IN-1 -s 10.0.1.2/32 -j RETURN
-A DIBS-IN-1 -j DROP
-A DIBS-PREROUTING -i dibs1 -g DIBS-IN-1
-A DIBS-POSTROUTING -m mark --mark 0x0/0xf000000 -j RETURN
-A DIBS-POSTROUTING -m mark --mark 0xf000000/0xf000000 -j RETURN
-A DIBS-POSTROUTING -o dibs1 -m mark --mark 0x1000000/0xf000000 -j RETURN
-A DIBS-POSTROUTING -m mark --mark 0x1000000/0xf000000 -j DROP
-A DIBS-POSTROUTING -j DROP
-I PREROUTING 1 -j DIBS-PREROUTING
-I POSTROUTING 1 -j DIBS-POSTROUTING
COMMIT
*filter
:DIBS-REFUSE - [0:0]
-A DIBS-REFUSE -o dibs1 -m mark --mark 0x0/0xf000000 -j REJECT --reject-with icmp-host-unreachable
-I OUTPUT 1 -j DIBS-REFUSE
COMMIT
EOF
sysctl net/ipv4/conf/dibs1/rp_filter=2
sysctl net/ipv4/conf/dibs1/forwarding=0
sysctl net/ipv6/conf/dibs1/forwarding=0
sysctl net/ipv6/conf/dibs1/accept_ra=0
sysctl net/ipv6/conf/dibs1/autoconf=0
sysctl net/ipv6/conf/dibs1/router_solicitations=0
sysctl net/ipv6/conf/dibs1/accept_redirects=0
sysctl net/ipv6/conf/dibs1/addr_gen_mode=1
ip link set dibs1 mtu 65535
tc qdisc replace dev dibs1 root noqueue
ip link set dibs1 up
ip -4 route add unreachable 0.0.0.0/0 table 5201 metric 4294967295
ip address add 10.0.1.1/32 dev dibs1
ip -4 route add 10.0.1.2/32 dev dibs1 table 5200 metric 1001
ip -4 route add 0.0.0.0/0 dev dibs1 table 5201 metric 1
ip -4 rule add fwmark 0x1000000/0xf000000 table 5201 priority 5200
ip -4 rule add iif lo table 5200 priority 32800
iptables-restore --noflush --wait <<EOF
*mangle
:DIBS-FOLLOW - [0:0]
:DIBS-SET-1 - [0:0]
:DIBS-STEER - [0:0]
:DIBS-OUTPUT - [0:0]
:DIBS-INPUT - [0:0]
-A DIBS-FOLLOW -j CONNMARK --restore-mark --nfmask 0xf000000 --ctmask 0xf000000
-A DIBS-SET-1 -j CONNMARK --set-xmark 0x1000000/0xf000000
-A DIBS-SET-1 -j MARK --set-xmark 0x1000000/0xf000000
-A DIBS-STEER -o lo -j RETURN
-A DIBS-STEER -m connmark --mark 0x10000000/0x10000000 -g DIBS-FOLLOW
-A DIBS-STEER -p tcp -m tcp --dport 80 -m comment --comment dibs-rule-1 -g DIBS-SET-1
-A DIBS-STEER -m connmark ! --mark 0x0/0xf000000 -g DIBS-FOLLOW
-A DIBS-OUTPUT -m mark --mark 0xf000000/0xf000000 -j RETURN
-A DIBS-OUTPUT -d 10.0.1.2/32 -g DIBS-STEER
-A DIBS-INPUT -i dibs1 -m connmark --mark 0x0/0x1f000000 -j CONNMARK --set-xmark 0x1000000/0xf000000
-I OUTPUT 1 -j DIBS-OUTPUT
-I INPUT 1 -j DIBS-INPUT
COMMIT
EOF
";
    assert_eq!(text(&one()), expected);
}

#[test]
fn a_foreign_device_is_routed_to_and_not_touched() {
    let mut desired = one();
    desired.bumps = vec![bump(3, "tun9", DeviceOwner::Foreign, &["fd00::/64"])];
    desired.rules = Vec::new();
    let expected = "\
ip6tables-restore --noflush --wait <<EOF
*mangle
:DIBS-POSTROUTING - [0:0]
-A DIBS-POSTROUTING -m mark --mark 0x0/0xf000000 -j RETURN
-A DIBS-POSTROUTING -m mark --mark 0xf000000/0xf000000 -j RETURN
-A DIBS-POSTROUTING -o tun9 -m mark --mark 0x3000000/0xf000000 -j RETURN
-A DIBS-POSTROUTING -m mark --mark 0x3000000/0xf000000 -j DROP
-A DIBS-POSTROUTING -j DROP
-I POSTROUTING 1 -j DIBS-POSTROUTING
COMMIT
EOF
ip -6 route add unreachable ::/0 table 5203 metric 4294967295
ip -6 route add ::/0 dev tun9 table 5203 metric 1
ip -6 rule add fwmark 0x3000000/0xf000000 table 5203 priority 5200
ip6tables-restore --noflush --wait <<EOF
*mangle
:DIBS-FOLLOW - [0:0]
:DIBS-STEER - [0:0]
:DIBS-OUTPUT - [0:0]
:DIBS-INPUT - [0:0]
-A DIBS-FOLLOW -j CONNMARK --restore-mark --nfmask 0xf000000 --ctmask 0xf000000
-A DIBS-STEER -o lo -j RETURN
-A DIBS-STEER -m connmark --mark 0x10000000/0x10000000 -g DIBS-FOLLOW
-A DIBS-STEER -m connmark ! --mark 0x0/0xf000000 -g DIBS-FOLLOW
-A DIBS-OUTPUT -m mark --mark 0xf000000/0xf000000 -j RETURN
-A DIBS-OUTPUT -d fd00::/64 -g DIBS-STEER
-A DIBS-INPUT -s fd00::/64 -i tun9 -m connmark --mark 0x0/0x1f000000 -j CONNMARK --set-xmark 0x3000000/0xf000000
-I OUTPUT 1 -j DIBS-OUTPUT
-I INPUT 1 -j DIBS-INPUT
COMMIT
EOF
";
    assert_eq!(text(&desired), expected);
}

#[test]
fn fail_open_has_neither_guard_nor_unreachable() {
    let text = text(&Desired {
        fail: Fail::Open,
        ..one()
    });
    assert!(!text.contains("POSTROUTING") && !text.contains("unreachable 0"));
    assert!(text.contains("-g DIBS-SET-1") && text.contains("fwmark 0x1000000/0xf000000"));
}

/// The rules of DIBS-STEER between OVERRIDE and following.
fn class_rules(desired: &Desired, family: Family) -> Vec<String> {
    let plan = Plan::new(desired).unwrap();
    let steer = plan
        .chains(family)
        .iter()
        .find(|chain| chain.name == "DIBS-STEER");
    let rules = &steer.unwrap().rules;
    rules[2..rules.len() - 1].to_vec()
}

#[test]
fn class_rules_match_what_they_name_and_only_the_bumps_peers() {
    let mut desired = one();
    let peers = ["10.0.1.2", "10.2.0.0/16", "fd00::2"];
    desired.bumps = vec![
        bump(1, "dibs1", DeviceOwner::Ours, &peers),
        bump(2, "tun9", DeviceOwner::Foreign, &["10.2.0.0/16"]),
    ];
    let [first, second] = [1, 2].map(|id| BumpId::new(id).unwrap());
    let prefix = |text: &str| -> Option<Prefix> { Some(text.parse().unwrap()) };
    desired.rules = vec![
        ClassRule {
            sport: Some(5201),
            uid: Some(1000),
            gid: Some(7),
            ..ClassRule::tcp(1, first)
        },
        ClassRule {
            destination: prefix("10.2.3.0/24"),
            ..ClassRule::tcp(2, second)
        },
        ClassRule {
            destination: prefix("10.0.0.0/8"),
            ..ClassRule::tcp(3, second)
        },
        ClassRule {
            destination: prefix("10.0.1.2"),
            ..ClassRule::tcp(4, second)
        },
        ClassRule {
            source: prefix("fd00::1"),
            ..ClassRule::tcp(5, first)
        },
    ];
    assert_eq!(
        class_rules(&desired, Family::V4),
        [
            "-p tcp -m tcp --sport 5201 -m owner --uid-owner 1000 --gid-owner 7 \
             -m comment --comment dibs-rule-1 -g DIBS-SET-1",
            "-d 10.2.3.0/24 -p tcp -m comment --comment dibs-rule-2 -g DIBS-SET-2",
            "-d 10.2.0.0/16 -p tcp -m comment --comment dibs-rule-3 -g DIBS-SET-2",
        ]
    );
    assert_eq!(
        class_rules(&desired, Family::V6),
        [
            "-p tcp -m tcp --sport 5201 -m owner --uid-owner 1000 --gid-owner 7 \
             -m comment --comment dibs-rule-1 -g DIBS-SET-1",
            "-s fd00::1/128 -p tcp -m comment --comment dibs-rule-5 -g DIBS-SET-1",
        ]
    );
}
