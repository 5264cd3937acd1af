//! From any state to the wanted one, by the difference alone.

use std::collections::BTreeSet;

use dibs_policy::{
    BumpRoute, ClassRule, Desired, DeviceName, DeviceOwner, Fail, Ports, Steering, Watch,
};

use dibs_settings::Term;

use crate::lab::{ENDS, Lab, address, bump, connecting, wish};

pub(crate) fn repeating_changes_nothing(lab: &Lab) {
    let mut wish = wish();
    wish.rules = vec![
        ClassRule {
            sport: Some(1.into()),
            dport: Some(Ports {
                first: 2,
                last: 65535,
            }),
            uid: Some(0),
            ..ClassRule::tcp(1, bump(1))
        },
        ClassRule {
            terms: vec![Term::Gid(0)],
            ..ClassRule::tcp(2, bump(1))
        },
        ClassRule {
            source: Some(wish.bumps[0].peers[0]),
            ..ClassRule::tcp(3, bump(1))
        },
    ];
    let mut steering = lab.steered(&wish);
    assert_eq!(lab.set(&mut steering, &wish).steps, []);
    // Nor does a new daemon that never saw how its predecessor's rules were taken.
    assert_eq!(lab.set(&mut lab.steering(), &wish).steps, []);
}

pub(crate) fn what_others_remove_is_put_back(lab: &Lab) {
    let mut steering = lab.steered(&wish());
    let wanted = lab.state();
    for (program, family) in [("iptables", ""), ("ip6tables", "-6")] {
        for harm in [
            "-t mangle -F DIBS-POSTROUTING",
            "-t mangle -D OUTPUT -j DIBS-OUTPUT",
            "-t mangle -F",
            "-t filter -F OUTPUT",
        ] {
            lab.iptables(program, harm);
            lab.set(&mut steering, &wish());
            assert_eq!(lab.state(), wanted, "{program} {harm}");
        }
        // A second jump goes; one that is no longer the first becomes it again.
        lab.iptables(program, "-t mangle -A OUTPUT -j DIBS-OUTPUT");
        lab.iptables(program, "-t mangle -I OUTPUT -p udp -j ACCEPT");
        lab.set(&mut steering, &wish());
        lab.iptables(program, "-t mangle -D OUTPUT -p udp -j ACCEPT");
        assert_eq!(lab.state(), wanted, "{program} jumps");
        for harm in [
            "rule del priority 5200",
            "route flush table 5201",
            "route flush table 5200",
            "rule flush",
        ] {
            lab.sh(&format!("ip {family} {harm}"));
            if harm == "rule flush" {
                lab.sh(&format!("ip {family} rule add priority 32766 lookup main"));
                if family.is_empty() {
                    lab.sh("ip rule add priority 32767 lookup default");
                }
            }
            lab.set(&mut steering, &wish());
            assert_eq!(sorted(&lab.state()), sorted(&wanted), "{family} {harm}");
        }
    }
    lab.sh("ip addr del 10.7.1.1/32 dev dibs1; ip link set dibs1 mtu 1400 down");
    lab.set(&mut steering, &wish());
    assert_eq!(sorted(&lab.state()), sorted(&wanted));
    assert!(
        lab.sh("ip link show dibs1")
            .contains("mtu 65535 qdisc noqueue")
    );
}

/// The rules that `ip` makes anew carry another protocol than the kernel's own.
fn sorted(state: &str) -> BTreeSet<&str> {
    state.lines().collect()
}

pub(crate) fn every_wish_can_follow_every_other(lab: &Lab) {
    lab.sh("ip link add tun9 type veth peer name far9; ip link set tun9 up");
    let before = lab.state();
    let foreign = BumpRoute {
        id: bump(9),
        device: DeviceName::new("tun9").expect("a name"),
        owner: DeviceOwner::Foreign,
        addresses: Vec::new(),
        peers: vec!["10.7.1.2/32".parse().expect("a prefix")],
    };
    let mut both = wish();
    both.bumps.push(foreign.clone());
    both.rules.push(ClassRule {
        dport: Some(443.into()),
        ..ClassRule::tcp(2, bump(9))
    });
    let mut one_family = wish();
    one_family.bumps[0].peers.truncate(1);
    let wishes = [
        Desired::default(),
        wish(),
        both,
        Desired {
            bumps: vec![foreign],
            rules: Vec::new(),
            ..wish()
        },
        Desired {
            fail: Fail::Open,
            ..wish()
        },
        one_family,
        Desired {
            table_base: 7000,
            rule_priority: 99,
            ..wish()
        },
    ];
    // Each on a clean host first: what it looks like must not depend on what was before.
    let mut steering = lab.steering();
    let alone: Vec<_> = wishes
        .iter()
        .map(|wish| {
            lab.set(&mut steering, wish);
            let state = owned(lab);
            lab.set(&mut steering, &Desired::default());
            state
        })
        .collect();
    for from in 0..wishes.len() {
        for to in 0..wishes.len() {
            lab.set(&mut steering, &wishes[from]);
            lab.set(&mut steering, &wishes[to]);
            assert_eq!(owned(lab), alone[to], "from {from} to {to}");
        }
    }
    lab.set(&mut steering, &Desired::default());
    assert_eq!(ours(&lab.state()), ours(&before));
}

fn owned(lab: &Lab) -> BTreeSet<String> {
    ours(&lab.state())
}

/// What carries our names or our number.
fn ours(state: &str) -> BTreeSet<String> {
    let named = |line: &&str| line.contains("DIBS-") || line.contains("219");
    state.lines().filter(named).map(str::to_owned).collect()
}

pub(crate) fn a_missing_device_stays_closed(lab: &Lab) {
    let mut wish = wish();
    wish.bumps[0].device = DeviceName::new("dibs7").expect("a name");
    let mut steering = lab.steering();
    let report = lab.set(&mut steering, &wish);
    assert_eq!(
        report.warnings,
        ["device dibs7 is missing or down: its bump carries nothing"]
    );
    let attempts = ENDS.map(|(_, there)| {
        let listener = lab.peer_listens(80, there);
        (listener, connecting(address(there, 80), None))
    });
    // The device comes: the next call completes it, and what was held back goes there.
    lab.sh("ip link set dibs1 name dibs7");
    assert_eq!(lab.set(&mut steering, &wish).warnings, [""; 0]);
    let mut seen = BTreeSet::new();
    while seen.len() < ENDS.len() {
        seen.insert(lab.tun_takes().destination);
    }
    for (listener, _connecting) in attempts {
        let accepted = listener.accept().map_err(|error| error.kind());
        assert!(
            matches!(accepted, Err(std::io::ErrorKind::WouldBlock)),
            "{accepted:?}"
        );
    }
}

pub(crate) fn the_watch_tells_of_changes(lab: &Lab) {
    let mut steering: Steering = lab.steered(&wish());
    let mut watch = lab.open(|| Watch::open(0));
    for harm in ["ip rule del priority 5200", "ip -6 route flush table 5201"] {
        lab.sh(harm);
        lab.wait(watch.changed()).expect("a change");
        assert_ne!(lab.set(&mut steering, &wish()).steps, [], "{harm}");
        lab.wait(watch.changed()).expect("our own change");
    }
    if lab.variant == dibs_policy::Variant::Nft {
        lab.iptables("iptables", "-t mangle -F DIBS-POSTROUTING");
        lab.wait(watch.changed()).expect("a change");
        assert_ne!(lab.set(&mut steering, &wish()).steps, []);
    }
}
