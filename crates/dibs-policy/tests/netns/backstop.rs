//! The table of nftables, whatever there is to be kept in.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use dibs_policy::{Backstop, Binding, ClassRule, Desired, Known, Place, Ports, Standing, Strength};
use dibs_wire::FlowKey;
use nix::poll::PollFlags;

use crate::lab::{ENDS, Lab, address, bump, connecting, wait_for, wish};

fn with(rules: Vec<ClassRule>) -> Desired {
    Desired { rules, ..wish() }
}

fn required(dport: impl Into<Ports>) -> ClassRule {
    ClassRule {
        dport: Some(dport.into()),
        binding: Binding::Required,
        ..ClassRule::tcp(1, bump(1))
    }
}

/// More than one transaction of a socket's ordinary size: 212,992 bytes.
fn hundreds() -> Desired {
    let rule = |port: u16| ClassRule {
        id: port.into(),
        uid: Some(0),
        ..required(port)
    };
    with((8000..8300).map(rule).collect())
}

fn stands(backstop: &Backstop) -> bool {
    matches!(backstop.standing(), Standing::Stands(_))
}

fn dropped(lab: &Lab, backstop: &mut Backstop) -> u64 {
    lab.wait(backstop.dropped()).expect("counted")
}

/// Whether a SYN is dropped; else it arrives.
fn keeps_in(lab: &Lab, backstop: &mut Backstop, to: SocketAddr) -> bool {
    let before = dropped(lab, backstop);
    let listener = lab.peer_listens(to.port(), &to.ip().to_string());
    let _begun = connecting(to, None);
    if dropped(lab, backstop) > before {
        return true;
    }
    wait_for(&listener, PollFlags::POLLIN, "a plain connection");
    false
}

fn set(lab: &Lab, backstop: &mut Backstop, desired: &Desired, known: &Known) {
    let set = lab.wait(backstop.set(desired, known));
    set.expect("a table of nftables");
    assert!(stands(backstop), "{:?}", backstop.standing());
}

pub(crate) fn a_range_of_ports_is_known_as_one(lab: &Lab) {
    let range = |first, last| Ports { first, last };
    let served = ClassRule {
        dport: None,
        sport: Some(range(9000, 9009)),
        ..required(1)
    };
    let desired = with(vec![required(range(8000, 8199)), served]);
    let mut backstop = lab.open(Backstop::open);
    let mut steering = lab.steered(&desired);
    assert_eq!(lab.set(&mut steering, &desired).steps, [], "as written");
    set(lab, &mut backstop, &desired, &Known::default());
    let rules = lab.sh("nft -a list chain inet dibs steer");
    let of_rule = rules.matches("comment \"dibs-rule-1 ").count();
    assert_eq!(of_rule, 4, "one for each range and family: {rules}");
    // Each layer alone keeps them in.
    for program in ["iptables", "ip6tables"] {
        lab.iptables(program, "-t mangle -F DIBS-STEER");
    }
    for (_, there) in ENDS {
        for port in [8000, 8100, 8199] {
            assert!(keeps_in(lab, &mut backstop, address(there, port)), "{port}");
        }
    }
    for program in ["iptables", "ip6tables"] {
        lab.iptables(program, "-t mangle -F");
    }
    for (here, there) in ENDS {
        for port in [8000, 8100, 8199] {
            assert!(keeps_in(lab, &mut backstop, address(there, port)), "{port}");
        }
        for port in [7999, 8200] {
            assert!(
                !keeps_in(lab, &mut backstop, address(there, port)),
                "{port}"
            );
        }
        // What answers from such a port.
        let before = dropped(lab, &mut backstop);
        let _listener = std::net::TcpListener::bind(address(here, 9009)).expect("a listener");
        let _begun = lab.on_peer(|| connecting(address(here, 9009), None));
        assert!(dropped(lab, &mut backstop) > before, "answered in plain");
    }
}

pub(crate) fn hundreds_of_rules_fit(lab: &Lab) {
    let desired = hundreds();
    let mut backstop = lab.open(Backstop::open);
    lab.wait(backstop.check(&desired)).expect("taken");
    set(lab, &mut backstop, &desired, &Known::default());
    // In place of others, too.
    set(lab, &mut backstop, &wish(), &Known::default());
    set(lab, &mut backstop, &desired, &Known::default());
    for (_, there) in ENDS {
        for port in [8000, 8299] {
            assert!(keeps_in(lab, &mut backstop, address(there, port)), "{port}");
        }
        assert!(!keeps_in(lab, &mut backstop, address(there, 8300)));
    }
}

pub(crate) fn thousands_of_connections_fit(lab: &Lab) {
    let free = with(Vec::new());
    let ends = |(here, there): (&str, &str), port: u16| -> FlowKey {
        let (here, there) = (address(here, port), address(there, 8080));
        FlowKey::tcp(here, there)
    };
    let all: BTreeSet<FlowKey> = ENDS
        .into_iter()
        .flat_map(|pair| (1..=6000).map(move |port| ends(pair, port)))
        .collect();
    let known = |bumped: &BTreeSet<FlowKey>| Known {
        bumped: bumped.clone(),
        ..Known::default()
    };
    let count = |set: &str| {
        let listed = lab.sh(&format!("nft list set inet dibs {set}"));
        listed.matches(" . 8080").count()
    };
    let counts = || ["bumped4", "bumped6", "locked4", "locked6"].map(count);
    let mut backstop = lab.open(Backstop::open);
    set(lab, &mut backstop, &free, &Known::default());
    // As they come, and as they are found by another daemon.
    let places: Vec<(FlowKey, Place)> = all.iter().map(|ends| (*ends, Place::Bumped)).collect();
    lab.wait(backstop.note(&places)).expect("noted");
    lab.wait(backstop.set_locked(all.clone())).expect("noted");
    assert_eq!(counts(), [6000; 4]);
    let places: Vec<(FlowKey, Place)> = all.iter().map(|ends| (*ends, Place::Elsewhere)).collect();
    lab.wait(backstop.note(&places)).expect("noted");
    lab.wait(backstop.set_locked(BTreeSet::new()))
        .expect("noted");
    assert_eq!(counts(), [0; 4]);
    set(lab, &mut backstop, &free, &known(&all));
    assert_eq!(counts(), [6000, 6000, 0, 0]);
    set(lab, &mut backstop, &free, &known(&BTreeSet::new()));
    assert_eq!(counts(), [0; 4]);
}

pub(crate) fn what_another_program_owns_is_named_and_taken_once_it_is_free(lab: &Lab) {
    let mut other = lab.open(Backstop::open);
    set(lab, &mut other, &wish(), &Known::default());
    // More refusals than a socket holds.
    let desired = hundreds();
    let mut backstop = lab.open(Backstop::open);
    assert_eq!(*backstop.standing(), Standing::Idle);
    let whose = "set up the table inet dibs of nftables (does another program own it?): Operation not permitted";
    for _ in 0..2 {
        let refused = lab.wait(backstop.check(&desired)).expect_err("owned");
        assert!(refused.to_string().starts_with(whose), "{refused}");
        assert_eq!(*backstop.standing(), Standing::Idle);
    }
    for _ in 0..2 {
        let refused = lab.wait(backstop.set(&desired, &Known::default()));
        let why = refused.expect_err("owned").to_string();
        assert!(why.starts_with(whose), "{why}");
        assert_eq!(*backstop.standing(), Standing::Failed(why));
    }
    drop(other);
    set(lab, &mut backstop, &desired, &Known::default());
    // What it could not be told the next `set` tells it.
    let odd = FlowKey::tcp(([10, 7, 0, 1], 1), ([0xfd07, 0, 0, 0, 0, 0, 0, 1], 1));
    let noted = lab.wait(backstop.note(&[(odd, Place::Bumped)]));
    noted.expect_err("of two families");
    assert!(matches!(backstop.standing(), Standing::Failed(_)));
    set(lab, &mut backstop, &desired, &Known::default());
    assert_eq!(*backstop.standing(), Standing::Stands(Strength::Lasting));
    // The next daemon has another file, and needs hooks that this one did without.
    drop(backstop);
    let gateway = Desired {
        gateway: vec!["192.168.7.0/24".parse().expect("a network")],
        ..desired
    };
    let mut backstop = lab.open(Backstop::open);
    lab.wait(backstop.check(&gateway)).expect("taken");
    set(lab, &mut backstop, &gateway, &Known::default());
    assert_eq!(*backstop.standing(), Standing::Stands(Strength::Lasting));
    assert!(lab.sh("nft list table inet dibs").contains("hook forward"));
    lab.wait(backstop.remove()).expect("removed");
    assert_eq!(*backstop.standing(), Standing::Idle);
}

pub(crate) fn to_look_changes_nothing(lab: &Lab) {
    let mut backstop = lab.open(Backstop::open);
    lab.wait(backstop.check(&hundreds())).expect("taken");
    assert_eq!(*backstop.standing(), Standing::Idle);
    let tables = lab.sh("nft list tables");
    assert!(!tables.contains("inet dibs"), "{tables}");
    set(lab, &mut backstop, &wish(), &Known::default());
    let before = lab.sh("nft list table inet dibs");
    lab.wait(backstop.check(&hundreds())).expect("taken");
    assert_eq!(lab.sh("nft list table inet dibs"), before);
    assert!(stands(&backstop));
}
