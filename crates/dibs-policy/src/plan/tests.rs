use dibs_settings::Term;

use super::*;
use ipnet::IpNet;

use crate::{Binding, BumpRoute, ClassRule, DeviceName, DeviceOwner, Fail};

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
    rule.dport = Some(80.into());
    Desired {
        bumps: vec![bump(1, "dibs1", DeviceOwner::Ours, &["10.0.1.2/32"])],
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
:DIBS-LOCKED - [0:0]
:DIBS-PLAIN - [0:0]
:DIBS-PREROUTING - [0:0]
:DIBS-POSTROUTING - [0:0]
-A DIBS-IN-1 -d 127.0.0.0/8 -j DROP
-A DIBS-IN-1 -p icmp -m icmp --icmp-type 5 -j DROP
-A DIBS-IN-1 -m addrtype ! --dst-type LOCAL -j DROP
-A DIBS-IN-1 -s 10.0.1.2/32 -j RETURN
-A DIBS-IN-1 -j DROP
-A DIBS-LOCKED -m connmark --mark 0x0/0xf000000 -j RETURN
-A DIBS-LOCKED -i lo -j RETURN
-A DIBS-LOCKED -i dibs1 -m connmark --mark 0x1000000/0xf000000 -j RETURN
-A DIBS-LOCKED -j DROP
-A DIBS-PLAIN -p tcp -m tcp --tcp-flags SYN,RST SYN,RST -j DROP
-A DIBS-PLAIN -p tcp -m tcp --tcp-flags FIN,RST FIN,RST -j DROP
-A DIBS-PLAIN -p tcp -m tcp --tcp-flags RST,URG RST,URG -j DROP
-A DIBS-PREROUTING -m connmark --mark 0x20000000/0x20000000 -j DIBS-LOCKED
-A DIBS-PREROUTING -i dibs1 -g DIBS-IN-1
-A DIBS-PREROUTING -s 10.0.1.2/32 -g DIBS-PLAIN
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
:DIBS-FORWARD - [0:0]
-A DIBS-REFUSE -o dibs1 -m mark --mark 0x0/0xf000000 -j REJECT --reject-with icmp-host-unreachable
-A DIBS-FORWARD -i dibs1 -j DROP
-A DIBS-FORWARD -o dibs1 -j DROP
-I OUTPUT 1 -j DIBS-REFUSE
-I FORWARD 1 -j DIBS-FORWARD
COMMIT
EOF
sysctl net/ipv4/conf/dibs1/rp_filter=2
sysctl net/ipv4/conf/dibs1/forwarding=0
sysctl net/ipv6/conf/dibs1/forwarding=0
sysctl net/ipv6/conf/dibs1/disable_ipv6=0
sysctl net/ipv6/conf/dibs1/accept_ra=0
sysctl net/ipv6/conf/dibs1/autoconf=0
sysctl net/ipv6/conf/dibs1/router_solicitations=0
sysctl net/ipv6/conf/dibs1/accept_redirects=0
sysctl net/ipv6/conf/dibs1/addr_gen_mode=1
ip link set dibs1 mtu 65535
tc qdisc replace dev dibs1 root noqueue
ip link set dibs1 up
ip -4 route add blackhole 0.0.0.0/0 table 5201 metric 4294967295
ip address add 10.0.1.1/32 dev dibs1
ip -4 route add 10.0.1.2/32 dev dibs1 table 5200 metric 1001
ip -4 route add 0.0.0.0/0 dev dibs1 table 5201 metric 1
ip -4 rule add fwmark 0x1000000/0xf000000 table 5201 priority 5200
ip -4 rule add iif lo table 5200 priority 32800
iptables-restore --noflush --wait <<EOF
*mangle
:DIBS-SET-1 - [0:0]
:DIBS-FOLLOW - [0:0]
:DIBS-STEER - [0:0]
:DIBS-OUTPUT - [0:0]
:DIBS-INPUT - [0:0]
-A DIBS-SET-1 -j CONNMARK --set-xmark 0x1000000/0xf000000
-A DIBS-SET-1 -j MARK --set-xmark 0x1000000/0xf000000
-A DIBS-FOLLOW -m conntrack --ctproto 6 -j CONNMARK --restore-mark --nfmask 0xf000000 --ctmask 0xf000000
-A DIBS-STEER -o lo -j RETURN
-A DIBS-STEER -m connmark --mark 0x10000000/0x10000000 -g DIBS-FOLLOW
-A DIBS-STEER -p tcp -m tcp --dport 80 -m comment --comment dibs-rule-1 -g DIBS-SET-1
-A DIBS-STEER -m connmark ! --mark 0x0/0xf000000 -g DIBS-FOLLOW
-A DIBS-OUTPUT -m mark --mark 0xf000000/0xf000000 -j RETURN
-A DIBS-OUTPUT -d 10.0.1.2/32 -g DIBS-STEER
-A DIBS-INPUT -i dibs1 -p tcp -m tcp ! --tcp-flags RST RST -m connmark --mark 0x0/0x1f000000 -j CONNMARK --set-xmark 0x1000000/0xf000000
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
:DIBS-LOCKED - [0:0]
:DIBS-PLAIN - [0:0]
:DIBS-PREROUTING - [0:0]
:DIBS-POSTROUTING - [0:0]
-A DIBS-LOCKED -m connmark --mark 0x0/0xf000000 -j RETURN
-A DIBS-LOCKED -i lo -j RETURN
-A DIBS-LOCKED -i tun9 -m connmark --mark 0x3000000/0xf000000 -j RETURN
-A DIBS-LOCKED -j DROP
-A DIBS-PLAIN -p tcp -m tcp --tcp-flags SYN,RST SYN,RST -j DROP
-A DIBS-PLAIN -p tcp -m tcp --tcp-flags FIN,RST FIN,RST -j DROP
-A DIBS-PLAIN -p tcp -m tcp --tcp-flags RST,URG RST,URG -j DROP
-A DIBS-PREROUTING -m connmark --mark 0x20000000/0x20000000 -j DIBS-LOCKED
-A DIBS-PREROUTING -s fd00::/64 -g DIBS-PLAIN
-A DIBS-POSTROUTING -m mark --mark 0x0/0xf000000 -j RETURN
-A DIBS-POSTROUTING -m mark --mark 0xf000000/0xf000000 -j RETURN
-A DIBS-POSTROUTING -o tun9 -m mark --mark 0x3000000/0xf000000 -j RETURN
-A DIBS-POSTROUTING -m mark --mark 0x3000000/0xf000000 -j DROP
-A DIBS-POSTROUTING -j DROP
-I PREROUTING 1 -j DIBS-PREROUTING
-I POSTROUTING 1 -j DIBS-POSTROUTING
COMMIT
EOF
ip -6 route add blackhole ::/0 table 5203 metric 4294967295
ip -6 route add ::/0 dev tun9 table 5203 metric 1
ip -6 rule add fwmark 0x3000000/0xf000000 table 5203 priority 5200
ip6tables-restore --noflush --wait <<EOF
*mangle
:DIBS-FOLLOW - [0:0]
:DIBS-STEER - [0:0]
:DIBS-OUTPUT - [0:0]
:DIBS-INPUT - [0:0]
-A DIBS-FOLLOW -m conntrack --ctproto 6 -j CONNMARK --restore-mark --nfmask 0xf000000 --ctmask 0xf000000
-A DIBS-STEER -o lo -j RETURN
-A DIBS-STEER -m connmark --mark 0x10000000/0x10000000 -g DIBS-FOLLOW
-A DIBS-STEER -m connmark ! --mark 0x0/0xf000000 -g DIBS-FOLLOW
-A DIBS-OUTPUT -m mark --mark 0xf000000/0xf000000 -j RETURN
-A DIBS-OUTPUT -d fd00::/64 -g DIBS-STEER
-A DIBS-INPUT -s fd00::/64 -i tun9 -p tcp -m tcp ! --tcp-flags RST RST -m connmark --mark 0x0/0x1f000000 -j CONNMARK --set-xmark 0x3000000/0xf000000
-I OUTPUT 1 -j DIBS-OUTPUT
-I INPUT 1 -j DIBS-INPUT
COMMIT
EOF
";
    assert_eq!(text(&desired), expected);
}

#[test]
fn fail_open_has_neither_guard_nor_blackhole() {
    let text = text(&Desired {
        fail: Fail::Open,
        ..one()
    });
    assert!(!text.contains("POSTROUTING") && !text.contains("blackhole 0"));
    // Who lets packets out in plain has to take them in plain.
    assert!(text.contains("-g DIBS-IN-1") && !text.contains("LOCKED") && !text.contains("PLAIN"));
    assert!(text.contains("-g DIBS-SET-1") && text.contains("fwmark 0x1000000/0xf000000"));
}

/// The rules of one chain.
fn rules(desired: &Desired, family: Family, name: &str) -> Vec<String> {
    let plan = Plan::new(desired).unwrap();
    let chain = plan.chains(family).iter().find(|chain| chain.name == name);
    chain.map(|chain| chain.rules.clone()).unwrap_or_default()
}

#[test]
fn what_is_required_stands_first_and_is_kept_out_otherwise() {
    let mut desired = one();
    desired.bumps[0].peers.push("fd00::2/128".parse().unwrap());
    desired.rules[0].binding = Binding::Required;
    desired.rules.push(ClassRule {
        sport: Some(9000.into()),
        destination: Some("10.0.1.2/32".parse().unwrap()),
        source: Some("10.0.1.1/32".parse().unwrap()),
        binding: Binding::Required,
        ..ClassRule::tcp(2, BumpId::new(1).unwrap())
    });
    desired.rules.push(ClassRule {
        uid: Some(7),
        binding: Binding::Required,
        ..ClassRule::tcp(3, BumpId::new(1).unwrap())
    });
    let tcp = |ports: &str, id: u32| format!("-p tcp {ports}-m comment --comment dibs-rule-{id}");
    let (http, served) = (tcp("-m tcp --dport 80 ", 1), tcp("-m tcp --sport 9000 ", 2));
    let owned = tcp("-m owner --uid-owner 7 ", 3);
    let narrow = "-s 10.0.1.1/32 -d 10.0.1.2/32";
    assert_eq!(
        rules(&desired, Family::V4, "DIBS-STEER"),
        [
            "-o lo -j RETURN".to_owned(),
            format!("{http} -g DIBS-LOCK-1"),
            format!("{narrow} {served} -g DIBS-LOCK-1"),
            format!("{owned} -g DIBS-LOCK-1"),
            "-m connmark --mark 0x10000000/0x10000000 -g DIBS-FOLLOW".to_owned(),
            "-m connmark ! --mark 0x0/0xf000000 -g DIBS-FOLLOW".to_owned(),
        ]
    );
    assert_eq!(
        rules(&desired, Family::V4, "DIBS-LOCK-1"),
        [
            "-j CONNMARK --set-xmark 0x21000000/0x2f000000",
            "-j MARK --set-xmark 0x1000000/0xf000000",
        ]
    );
    assert_eq!(
        rules(&desired, Family::V4, "DIBS-REQUIRED-OUT"),
        [
            "-o lo -j RETURN".to_owned(),
            format!("! -o dibs1 {http} -j DROP"),
            format!("{narrow} ! -o dibs1 {served} -j DROP"),
            format!("! -o dibs1 {owned} -j DROP"),
        ]
    );
    // Whose socket it is for is not known on the way in.
    let (http, served) = (tcp("-m tcp --sport 80 ", 1), tcp("-m tcp --dport 9000 ", 2));
    let narrow = "-s 10.0.1.2/32 -d 10.0.1.1/32";
    assert_eq!(
        rules(&desired, Family::V4, "DIBS-REQUIRED-IN"),
        [
            format!("! -i dibs1 {http} -j DROP"),
            format!("{narrow} ! -i dibs1 {served} -j DROP"),
        ]
    );
    assert_eq!(
        rules(&desired, Family::V6, "DIBS-REQUIRED-IN"),
        [format!("! -i dibs1 {http} -j DROP")]
    );
    assert_eq!(
        rules(&desired, Family::V4, "DIBS-PREROUTING"),
        [
            "-m connmark --mark 0x20000000/0x20000000 -j DIBS-LOCKED",
            "-s 10.0.1.2/32 -j DIBS-REQUIRED-IN",
            "-i dibs1 -g DIBS-IN-1",
            "-s 10.0.1.2/32 -g DIBS-PLAIN",
        ]
    );
    let guard = rules(&desired, Family::V4, "DIBS-POSTROUTING");
    assert_eq!(
        guard[..3],
        [
            "-m mark --mark 0xf000000/0xf000000 -j RETURN",
            "-d 10.0.1.2/32 -j DIBS-REQUIRED-OUT",
            "-m mark --mark 0x0/0xf000000 -j RETURN",
        ]
    );
    assert!(rules(&desired, Family::V4, "DIBS-SET-1").is_empty());
}

/// Others are behind the router of a peer's connection.
#[test]
fn rules_mean_what_is_on_a_bump_of_an_address_that_others_have_too() {
    let mut desired = one();
    let router: IpNet = "198.51.100.2/32".parse().unwrap();
    desired.bumps[0].peers.push(router);
    desired.shared = vec![router];
    desired.rules[0].binding = Binding::Required;
    desired.rules.push(ClassRule {
        // That of one connection names both ends.
        destination: Some(router),
        binding: Binding::Pinned,
        ..ClassRule::tcp(0, BumpId::new(1).unwrap())
    });
    let class = |port: &str, id: u32| format!("{port}-m comment --comment dibs-rule-{id}");
    let on_a_bump = "-m connmark ! --mark 0x0/0xf000000";
    let http = class("-p tcp -m tcp --dport 80 ", 1);
    assert_eq!(
        rules(&desired, Family::V4, "DIBS-STEER"),
        [
            "-o lo -j RETURN".to_owned(),
            format!("-d 10.0.1.2/32 {http} -g DIBS-LOCK-1"),
            format!("-d 198.51.100.2/32 {http} {on_a_bump} -g DIBS-LOCK-1"),
            "-m connmark --mark 0x10000000/0x10000000 -g DIBS-FOLLOW".to_owned(),
            format!("-d 198.51.100.2/32 {} -g DIBS-SET-1", class("-p tcp ", 0)),
            format!("{on_a_bump} -g DIBS-FOLLOW"),
        ]
    );
    for (chain, ends) in [
        (
            "DIBS-REQUIRED-IN",
            "-s 198.51.100.2/32 ! -i dibs1 -p tcp -m tcp --sport",
        ),
        (
            "DIBS-REQUIRED-OUT",
            "-d 198.51.100.2/32 ! -o dibs1 -p tcp -m tcp --dport",
        ),
    ] {
        let dropped = class(&format!("{ends} 80 "), 1);
        let last = rules(&desired, Family::V4, chain).pop();
        assert_eq!(last, Some(format!("{dropped} {on_a_bump} -j DROP")));
    }
}

#[test]
fn a_pinned_connection_without_its_entry_is_kept_out_in_plain() {
    let mut desired = one();
    desired.rules.push(ClassRule {
        dport: Some(80.into()),
        sport: Some(4000.into()),
        destination: Some("10.0.1.2/32".parse().unwrap()),
        source: Some("10.0.1.1/32".parse().unwrap()),
        binding: Binding::Pinned,
        ..ClassRule::tcp(0, BumpId::new(1).unwrap())
    });
    let plain = rules(&desired, Family::V4, "DIBS-PLAIN");
    assert_eq!(
        plain[3..],
        [
            "-m connmark --mark 0x10000000/0x10000000 -j RETURN",
            "-s 10.0.1.2/32 -d 10.0.1.1/32 -p tcp -m tcp --sport 80 --dport 4000 \
             -m comment --comment dibs-rule-0 -j DROP",
        ]
    );
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
    let peers = ["10.0.1.2/32", "10.2.0.0/16", "fd00::2/128"];
    desired.bumps = vec![
        bump(1, "dibs1", DeviceOwner::Ours, &peers),
        bump(2, "tun9", DeviceOwner::Foreign, &["10.2.0.0/16"]),
    ];
    let [first, second] = [1, 2].map(|id| BumpId::new(id).unwrap());
    let prefix = |text: &str| -> Option<IpNet> { Some(text.parse().unwrap()) };
    desired.rules = vec![
        ClassRule {
            sport: Some(5201.into()),
            uid: Some(1000),
            terms: vec![Term::Gid(7)],
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
            destination: prefix("10.0.1.2/32"),
            ..ClassRule::tcp(4, second)
        },
        ClassRule {
            source: prefix("fd00::1/128"),
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

#[test]
fn a_gateway_steers_what_passes_between_its_networks_and_the_peers() {
    let mut desired = one();
    desired.gateway = vec!["192.168.7.0/24".parse().unwrap()];
    desired.bumps[0]
        .peers
        .push("192.168.8.0/24".parse().unwrap());
    let mut local = ClassRule::tcp(2, desired.bumps[0].id);
    local.uid = Some(1000);
    desired.rules.push(local);
    let plan = text(&desired);
    for expected in [
        // Not to all hosts of a network, and to none elsewhere.
        "-A DIBS-IN-1 -s 10.0.1.2/32 -d 192.168.7.0/24 -m addrtype --dst-type UNICAST -j RETURN\n\
         -A DIBS-IN-1 -s 192.168.8.0/24 -d 192.168.7.0/24 -m addrtype --dst-type UNICAST -j RETURN\n\
         -A DIBS-IN-1 -m addrtype ! --dst-type LOCAL -j DROP\n",
        // What a network sends is not what comes in plain, unless it comes from elsewhere.
        "-A DIBS-LOCKED -s 192.168.7.0/24 -d 192.168.8.0/24 -m rpfilter -j RETURN\n\
         -A DIBS-LOCKED -i dibs1 -m connmark --mark 0x1000000/0xf000000 -j RETURN\n\
         -A DIBS-LOCKED -j DROP\n",
        "-A DIBS-FORWARD -s 192.168.8.0/24 -d 192.168.7.0/24 -i dibs1 -j RETURN\n\
         -A DIBS-FORWARD -s 192.168.7.0/24 -d 192.168.8.0/24 -o dibs1 -m mark --mark 0x1000000/0xf000000 -j RETURN\n\
         -A DIBS-FORWARD -i dibs1 -j DROP\n\
         -A DIBS-FORWARD -o dibs1 -j DROP\n",
        // The rule of a user of this host is not for others.
        "-A DIBS-PASS -m addrtype --dst-type LOCAL -j RETURN\n\
         -A DIBS-PASS -m connmark --mark 0x10000000/0x10000000 -g DIBS-FOLLOW\n\
         -A DIBS-PASS -p tcp -m tcp --dport 80 -m comment --comment dibs-rule-1 -g DIBS-SET-1\n\
         -A DIBS-PASS -m connmark ! --mark 0x0/0xf000000 -g DIBS-FOLLOW\n",
        "-A DIBS-GATEWAY -s 192.168.7.0/24 -d 192.168.8.0/24 -g DIBS-PASS\n",
        "-A DIBS-PASSING -s 192.168.8.0/24 -d 192.168.7.0/24 -i dibs1 -p tcp \
         -m tcp ! --tcp-flags RST RST \
         -m connmark --mark 0x0/0x1f000000 \
         -j CONNMARK --set-xmark 0x1000000/0xf000000\n",
        "-I PREROUTING 1 -j DIBS-GATEWAY\n-I FORWARD 1 -j DIBS-PASSING\n",
        // A reverse path filter that looks at marks asks the bump's table for the way back into the network.
        "route add throw 192.168.7.0/24 table 5201 metric 0\n",
        "sysctl net/ipv4/conf/dibs1/forwarding=1\nsysctl net/ipv6/conf/dibs1/forwarding=1\n",
    ] {
        assert!(plan.contains(expected), "{expected} is not in {plan}");
    }
    let own = plan.matches("--uid-owner 1000").count();
    assert_eq!(own, 1, "in DIBS-STEER alone");
}

#[test]
fn what_is_behind_both_is_refused() {
    let mut desired = one();
    desired.gateway = vec!["10.0.0.0/8".parse().unwrap()];
    assert_eq!(
        desired.validate().unwrap_err().to_string(),
        "10.0.0.0/8 is behind this host and behind a peer"
    );
    desired.gateway = vec!["127.0.0.0/8".parse().unwrap()];
    assert!(desired.validate().is_err());
}
