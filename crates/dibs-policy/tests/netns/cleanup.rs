//! Leaving: everything of ours goes, nothing else.

use dibs_policy::conntrack::Conntrack;
use dibs_policy::{BumpRoute, Desired, DeviceName, Steering, Variant};
use dibs_wire::FlowKey;

use crate::lab::{ENDS, Lab, bump, marks, wish};

/// Rules, marks and routes of another program.
fn others(lab: &Lab) {
    for program in ["iptables", "ip6tables"] {
        for rule in [
            "-t mangle -N FOREIGN",
            "-t mangle -A FOREIGN -j MARK --set-xmark 0x80000/0xff0000",
            "-t mangle -A OUTPUT -p tcp --dport 9999 -j FOREIGN",
            "-t mangle -A POSTROUTING -m mark --mark 0x40000/0xff0000 -j ACCEPT",
            "-t filter -A INPUT -m conntrack --ctstate INVALID -j DROP",
            "-t filter -A OUTPUT -d 192.0.2.0/24 -m comment --comment \"not DIBS-OURS\" -j DROP",
        ] {
            let rule = if program == "ip6tables" {
                rule.replace("192.0.2.0/24", "2001:db8::/32")
            } else {
                rule.into()
            };
            lab.iptables(program, &rule);
        }
    }
    lab.sh("ip rule add fwmark 0x40000/0xff0000 lookup 52 priority 5210");
    lab.sh("ip -6 rule add fwmark 0x40000/0xff0000 lookup 52 priority 5210");
    lab.sh("ip route add 192.0.2.0/24 dev veth0 table 5201 proto static");
    lab.sh("ip link set dibs1 mtu 65535 up; ip addr add 192.0.2.1/32 dev dibs1");
    // The tables exist from now on; that they stay, empty, is no trace of ours.
    lab.sh("sysctl -qw net.ipv6.conf.dibs1.addr_gen_mode=1; ip -6 addr flush dev dibs1");
}

fn connection_mark(lab: &Lab, tuple: &FlowKey) -> u32 {
    let mut conntrack = lab.open(Conntrack::open);
    lab.wait(conntrack.get(tuple))
        .expect("a look")
        .expect("tracked")
        .mark
}

fn mark(lab: &Lab, stream: &std::net::TcpStream, value: u32) -> FlowKey {
    let ends = (
        stream.local_addr().expect("ours"),
        stream.peer_addr().expect("theirs"),
    );
    let tuple = FlowKey::tcp(ends.0, ends.1);
    let mut conntrack = lab.open(Conntrack::open);
    assert!(
        lab.wait(conntrack.set_mark(&tuple, value, u32::MAX))
            .expect("set")
    );
    tuple
}

pub(crate) fn leaves_what_others_made(lab: &Lab) {
    others(lab);
    let before = lab.state();
    lab.steered(&wish());
    assert_ne!(lab.state(), before);
    let streams = ENDS.map(|(_, there)| lab.connected(81, there));
    let locked = marks().mask() & !marks().bump_mask();
    let tuples: Vec<_> = streams
        .iter()
        .zip([marks().bump(bump(1)) | locked | 0x42, locked | 0xff])
        .map(|((near, _), value)| mark(lab, near, value))
        .collect();
    // A user's own jump into a chain of ours is no reason to stay.
    lab.iptables("iptables", "-t mangle -A FOREIGN -j DIBS-STEER");

    // As dibsctl does it: nothing known but the kernel.
    let mut steering = lab.open(|| Steering::system(None));
    let report = lab.wait(steering.cleanup(marks())).expect("cleanup");
    assert_eq!(report.warnings, [""; 0]);
    assert_eq!(lab.state(), before);
    assert_eq!(connection_mark(lab, &tuples[0]), 0x42);
    assert_eq!(connection_mark(lab, &tuples[1]), 0xff);
    assert_eq!(
        lab.wait(steering.cleanup(marks())).expect("again").steps,
        []
    );
}

pub(crate) fn a_rule_of_the_users_like_ours_is_left_alone(lab: &Lab) {
    let twin = "rule add fwmark 0x1000000/0xf000000 lookup 5201 priority 5200 protocol static";
    lab.sh(&format!("ip {twin}; ip -6 {twin}"));
    let mut steering = lab.steered(&wish());
    lab.wait(steering.cleanup(marks())).expect("cleanup");
    for family in ["", "-6"] {
        let rules = lab.sh(&format!("ip {family} rule"));
        assert!(rules.contains("lookup 5201 proto static"), "{rules}");
        assert!(!rules.contains("proto 219"), "{rules}");
    }
}

pub(crate) fn releases_the_bumps_that_go(lab: &Lab) {
    lab.sh("ip link add dibs2 type veth peer name far2");
    let mut two = wish();
    let second = BumpRoute {
        id: bump(2),
        device: DeviceName::new("dibs2").expect("a name"),
        ..two.bumps[0].clone()
    };
    two.bumps.push(second);
    let mut steering = lab.steered(&two);
    let streams = ENDS.map(|(_, there)| lab.connected(81, there));
    let first = mark(lab, &streams[0].0, marks().bump(bump(1)) | 0x42);
    let second = mark(
        lab,
        &streams[1].0,
        marks().bump(bump(2)) | marks().override_bit() | 0x42,
    );
    lab.set(&mut steering, &wish());
    assert_eq!(
        connection_mark(lab, &first),
        marks().bump(bump(1)) | 0x42,
        "its bump stays"
    );
    assert_eq!(connection_mark(lab, &second), 0x42, "its bump is gone");
    lab.set(&mut steering, &Desired::default());
    assert_eq!(connection_mark(lab, &first), 0x42);
}

pub(crate) fn finds_what_another_variant_left(lab: &Lab) {
    lab.steered(&wish());
    // Started without a choice, it takes the host's default, and clears the other, once.
    let mut steering = lab.open(|| Steering::system(None));
    lab.set(&mut steering, &wish());
    let mut cleared = || {
        lab.wait(steering.clear_others())
            .expect("programs that work")
    };
    cleared();
    assert_eq!(cleared(), []);
    let count = |program: &str| -> usize {
        lab.sh(&format!("{program}-save"))
            .matches("-j DIBS-OUTPUT")
            .count()
    };
    for family in ["iptables", "ip6tables"] {
        let found = ["nft", "legacy"].map(|variant| count(&format!("{family}-{variant}")));
        assert_eq!(
            (count(family), found[0] + found[1]),
            (1, 1),
            "{family}: {found:?}"
        );
    }
    assert_eq!(lab.set(&mut steering, &wish()).steps, []);
    let mut last = lab.open(|| Steering::system(Some(Variant::Default)));
    assert_eq!(lab.set(&mut last, &wish()).steps, []);
}
