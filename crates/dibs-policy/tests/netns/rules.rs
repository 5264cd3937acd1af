//! What a rule may name beside ports and addresses: the kernel takes it, means it, and guards it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dibs_policy::{
    Backstop, Binding, ClassRule, Desired, DeviceName, Error, Family, Hours, Known, Place,
};
use dibs_settings::Term;
use dibs_wire::FlowKey;
use nix::poll::PollFlags;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::lab::{ENDS, Lab, accept, address, bump, net_of, wait_for, wish};
use crate::packet::{Packet, SYN};

/// "EF".
const DSCP: u8 = 46;

fn set_dscp(socket: &Socket, v4: bool) {
    let tos = u32::from(DSCP) << 2;
    match v4 {
        true => socket.set_tos_v4(tos),
        false => socket.set_tclass_v6(tos),
    }
    .expect("a DSCP");
}

/// Begins a connection, marked with the DSCP or not.
fn begin(there: &str, marked: bool) -> Socket {
    let to = address(there, 80);
    let domain = Domain::for_address(to);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP)).expect("a socket");
    if marked {
        set_dscp(&socket, to.is_ipv4());
    }
    socket.set_nonblocking(true).expect("nonblocking");
    let begun = socket
        .connect(&to.into())
        .map_err(|error| error.raw_os_error());
    assert!(matches!(begun, Err(Some(libc::EINPROGRESS))), "{begun:?}");
    socket
}

/// An hour about now, and the rest of the day.
fn hours() -> [Hours; 2] {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = since.expect("after 1970").as_secs() % 86_400;
    let at = |ahead: u64| u32::try_from((now + ahead) % 86_400).expect("a day is short");
    let (start, end) = (at(86_400 - 1800), at(1800));
    [
        Hours { start, end },
        Hours {
            start: end,
            end: start,
        },
    ]
}

/// The next payload for a host that the TUN takes; it may hold again what was not acknowledged.
fn takes_to(lab: &Lab, there: &str) -> Vec<u8> {
    loop {
        let packet = lab.tun_takes();
        if packet.destination.ip() == address(there, 0).ip() && !packet.payload.is_empty() {
            return packet.payload;
        }
    }
}

fn matches(text: &str) -> Vec<Term> {
    vec![Term::parse("match", text).expect("matches of iptables")]
}

fn with(rules: &[ClassRule]) -> Desired {
    Desired {
        rules: rules.to_vec(),
        ..wish()
    }
}

fn rule() -> ClassRule {
    ClassRule {
        dport: Some(80.into()),
        ..ClassRule::tcp(1, bump(1))
    }
}

/// Pairs of rules: the first means what the lab sends, the second nothing of it.
fn meant_and_not() -> Vec<[ClassRule; 2]> {
    let [now, not_now] = hours();
    let device = |name| Some(DeviceName::new(name).expect("a name"));
    let both = |change: &dyn Fn(&mut ClassRule, bool)| {
        [true, false].map(|meant| {
            let mut rule = rule();
            change(&mut rule, meant);
            rule
        })
    };
    vec![
        // No other group exists here.
        both(&|rule, meant| {
            rule.terms = vec![Term::Gid(0)];
            rule.terms.extend((!meant).then_some(Term::Dscp(45)));
        }),
        both(&|rule, meant| rule.interface = device(if meant { "veth0" } else { "eth9" })),
        both(&|rule, meant| rule.terms = vec![Term::Dscp(if meant { DSCP } else { 45 })]),
        both(&|rule, meant| rule.hours = Some(if meant { now } else { not_now })),
        both(&|rule, meant| {
            let length = if meant { "0:1000" } else { "1001:65535" };
            rule.terms = matches(&format!("-m length --length {length} -m tos --tos 0xb8"));
        }),
    ]
}

pub(crate) fn each_match_means_what_it_says(lab: &Lab) {
    let mut steering = lab.steering();
    for [meant, not] in meant_and_not() {
        for (_, there) in ENDS {
            let listener = lab.peer_listens(80, there);
            lab.set(&mut steering, &with(std::slice::from_ref(&not)));
            let _plain = begin(there, true);
            wait_for(&listener, PollFlags::POLLIN, "a plain connection");
            accept(&listener);
            lab.set(&mut steering, &with(std::slice::from_ref(&meant)));
            let _bumped = begin(there, true);
            // The end of what was plain before comes by it, too.
            let is_first =
                |packet: &Packet| (packet.flags, packet.destination) == (SYN, address(there, 80));
            while !is_first(&lab.tun_takes()) {}
            assert!(listener.accept().is_err(), "{meant:?}");
        }
        let repeated = lab.set(&mut steering, &with(&[meant]));
        assert!(
            repeated.steps.is_empty(),
            "it is as it was written: {repeated:?}"
        );
    }
}

pub(crate) fn an_established_connection_follows_its_next_packet(lab: &Lab) {
    lab.steered(&with(&[ClassRule {
        terms: vec![Term::Dscp(DSCP)],
        ..rule()
    }]));
    for (_, there) in ENDS {
        let (mut near, mut far) = lab.connected(80, there);
        near.write_all(b"plain").expect("sent");
        let mut heard = [0; 5];
        far.read_exact(&mut heard).expect("received");
        let of = |near: &TcpStream| SockRef::from(near).try_clone().expect("a handle");
        let socket: Socket = of(&near);
        set_dscp(&socket, !there.contains(':'));
        near.write_all(b"bumped").expect("sent");
        assert_eq!(lab.tun_takes_data(), b"bumped");
    }
}

pub(crate) fn the_first_rule_that_fits_decides(lab: &Lab) {
    let second = |id| {
        let mut wish = wish();
        let mut other = wish.bumps[0].clone();
        other.id = bump(2);
        other.device = DeviceName::new("dibs2").expect("a name");
        wish.bumps.push(other);
        let dscp = ClassRule {
            terms: vec![Term::Dscp(DSCP)],
            ..ClassRule::tcp(1, bump(id))
        };
        wish.rules = vec![dscp, ClassRule::tcp(2, bump(3 - id))];
        wish
    };
    let mut steering = lab.steering();
    for (_, there) in ENDS {
        for (id, reaches) in [(1, true), (2, false)] {
            // The other device is not there: what goes to its bump goes nowhere.
            lab.wait(steering.set(&second(id))).expect("steered");
            let _marked = begin(there, reaches);
            let packet = lab.tun_takes();
            assert_eq!(packet.destination, address(there, 80));
            lab.sh("conntrack -F 2>/dev/null");
        }
    }
}

pub(crate) fn what_iptables_refuses_is_told_before_anything_is_installed(lab: &Lab) {
    let mut steering = lab.steering();
    let mut probe = |text: &str| {
        let rule = ClassRule {
            terms: matches(text),
            ..rule()
        };
        lab.wait(steering.probe(&rule, &Family::BOTH))
    };
    for (text, words) in [
        ("-m set --match-set nowhere dst", "nowhere"),
        ("-m dscp --dscp 99", "dscp"),
        ("-m owner --uid-owner", "uid-owner"),
        ("-m owner --socket-exists office", "office"),
    ] {
        match probe(text) {
            Err(Error::Refused(why)) => {
                assert!(why.contains(words), "{text}: {why}");
                assert_eq!(why.lines().count(), 1, "{why}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    let narrow = probe("-m iprange --dst-range 10.7.1.1-10.7.1.9").expect("taken");
    assert_eq!(narrow.families, [Family::V4]);
    assert_eq!(narrow.refusal.map(|(family, _)| family), Some(Family::V6));
    let wide = probe("-m length --length 0:99").expect("taken");
    assert_eq!(
        (wide.families.as_slice(), wide.refusal),
        (&Family::BOTH[..], None)
    );
    assert!(!lab.state().contains("DIBS"), "{}", lab.state());
}

/// The backstop of a wish, with the firewall that it stands behind flushed.
fn flushed(lab: &Lab, desired: &Desired) -> Backstop {
    let mut backstop = lab.open(Backstop::open);
    lab.steered(desired);
    lab.wait(backstop.set(desired, &Known::default()))
        .expect("a table of nftables");
    for program in ["iptables", "ip6tables"] {
        lab.iptables(program, "-t mangle -F");
    }
    backstop
}

pub(crate) fn the_backstop_knows_what_rules_name(lab: &Lab) {
    for [meant, not] in meant_and_not() {
        // What only iptables understands, it leaves alone.
        let knows = !meant
            .terms
            .iter()
            .any(|term| matches!(term, Term::Match(_)));
        let passes = |there: &str, backstop: &mut Backstop| {
            let before = lab.wait(backstop.dropped()).expect("counted");
            let listener = lab.peer_listens(80, there);
            let _begun = begin(there, true);
            if lab.wait(backstop.dropped()).expect("counted") > before {
                return false;
            }
            wait_for(&listener, PollFlags::POLLIN, "a plain connection");
            true
        };
        for (rule, dropped) in [(meant, knows), (not, false)] {
            let mut backstop = flushed(lab, &with(std::slice::from_ref(&rule)));
            for (_, there) in ENDS {
                assert_eq!(
                    passes(there, &mut backstop),
                    !dropped,
                    "{rule:?} to {there}"
                );
            }
            lab.wait(backstop.remove()).expect("removed");
        }
    }
}

pub(crate) fn what_was_dropped_stays_counted(lab: &Lab) {
    let rules = [rule(), ClassRule { id: 8, ..rule() }];
    let (few, more) = (with(&rules[..1]), with(&rules));
    let mut backstop = flushed(lab, &few);
    let dropped = |backstop: &mut Backstop| lab.wait(backstop.dropped()).expect("counted");
    let more_dropped = |backstop: &mut Backstop| {
        let before = dropped(backstop);
        for (_, there) in ENDS {
            begin(there, true);
        }
        let now = dropped(backstop);
        assert!(now >= before + 2, "{now}, {before} before");
        now
    };
    let before = more_dropped(&mut backstop);
    lab.wait(backstop.set(&more, &Known::default()))
        .expect("rules were added");
    assert!(dropped(&mut backstop) >= before, "more");
    let before = more_dropped(&mut backstop);
    lab.wait(backstop.narrow(&few)).expect("narrowed");
    assert!(dropped(&mut backstop) >= before, "fewer");
    let before = more_dropped(&mut backstop);
    lab.wait(backstop.remove()).expect("removed");
    assert!(dropped(&mut backstop) >= before, "none");
}

pub(crate) fn what_the_kernel_refuses_takes_nothing_else_with_it(lab: &Lab) {
    // No set has connections of two families.
    let odd = FlowKey::tcp(([10, 7, 0, 1], 1), ([0xfd07, 0, 0, 0, 0, 0, 0, 1], 1));
    for (_, there) in ENDS {
        let (mut near, _far) = lab.connected(80, there);
        let ends = FlowKey::tcp(
            near.local_addr().expect("bound"),
            near.peer_addr().expect("connected"),
        );
        let mut backstop = flushed(lab, &with(&[]));
        let drops = |backstop: &mut Backstop, near: &mut TcpStream| {
            let before = lab.wait(backstop.dropped()).expect("counted");
            near.write_all(b"plain").expect("sent");
            lab.wait(backstop.dropped()).expect("counted") > before
        };
        assert!(!drops(&mut backstop, &mut near));
        let places = [(ends, Place::Bumped), (odd, Place::Bumped)];
        let noted = lab.wait(backstop.note(&places));
        noted.expect_err("of two families");
        assert!(drops(&mut backstop, &mut near), "{ends:?}");
        lab.wait(backstop.remove()).expect("removed");
    }
}

pub(crate) fn a_preferred_bump_is_taken_where_there_is_a_session(lab: &Lab) {
    let mut desired = with(&[ClassRule {
        binding: Binding::Preferred,
        ..rule()
    }]);
    // Within a peer without a session is one that has one.
    desired.bumps[0].peers = ["10.7.0.0/16", "fd07:1::/32"]
        .map(|net| net.parse().expect("a prefix"))
        .into();
    let inner = ENDS.map(|(_, there)| net_of(there));
    let with_session = |up: bool| {
        let mut desired = desired.clone();
        let wide = desired.bumps[0].peers.iter().map(|net| (*net, !up));
        desired.sessions = wide.chain(inner.map(|net| (net, up))).collect();
        desired
    };
    let mut steering = lab.steering();
    for (_, there) in ENDS {
        lab.set(&mut steering, &with_session(false));
        let (mut near, mut far) = lab.connected(80, there);
        lab.set(&mut steering, &with_session(true));
        near.write_all(b"bumped").expect("sent");
        assert!(takes_to(lab, there).ends_with(b"bumped"));
        // Without a session it stays, and what begins is plain.
        lab.set(&mut steering, &with_session(false));
        near.write_all(b"waits").expect("sent");
        // What was sent before may come once more.
        while !takes_to(lab, there).ends_with(b"waits") {}
        far.set_nonblocking(true).expect("nonblocking");
        assert!(far.read(&mut [0; 8]).is_err(), "in plain");
        // At once, or what the ends send again, and how this host answers it, would be counted below.
        for end in [&near, &far] {
            let reset = SockRef::from(end).set_linger(Some(Duration::ZERO));
            reset.expect("no lingering");
        }
        drop((near, far));
        lab.connected(80, there);
    }
    for (up, word) in [(true, "dropped"), (false, "plain")] {
        let mut backstop = flushed(lab, &with_session(up));
        for (_, there) in ENDS {
            let before = lab.wait(backstop.dropped()).expect("counted");
            let listener = lab.peer_listens(80, there);
            let _begun = begin(there, false);
            let dropped = lab.wait(backstop.dropped()).expect("counted") > before;
            assert_eq!(dropped, up, "{word}");
            if !dropped {
                wait_for(&listener, PollFlags::POLLIN, "a plain connection");
            }
        }
        lab.wait(backstop.remove()).expect("removed");
    }
}
