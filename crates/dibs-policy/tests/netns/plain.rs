//! Plain packets of connections that are on a bump: not taken, not sent.

use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use dibs_netns::HANG;
use dibs_policy::conntrack::Conntrack;
use dibs_policy::{Binding, ClassRule, Desired, Steering};
use dibs_wire::FlowKey;
use ipnet::IpNet;
use nix::poll::PollFlags;
use socket2::{Domain, Protocol, Socket, Type};

use crate::lab::{ENDS, Lab, accept, address, bump, connecting, marks, wait_for, wish};
use crate::packet::{ACK, FIN, RST, SYN, URG, segment, syn};

fn ends(stream: &TcpStream) -> (SocketAddr, SocketAddr) {
    let local = stream.local_addr().expect("an address");
    (local, stream.peer_addr().expect("a peer"))
}

fn mark(lab: &Lab, stream: &TcpStream, value: u32) {
    let (near, far) = ends(stream);
    let mut conntrack = lab.open(Conntrack::open);
    let tuple = FlowKey::tcp(near, far);
    let set = lab.wait(conntrack.set_mark(&tuple, value, marks().mask()));
    assert!(set.expect("set"), "tracked");
}

fn drops(lab: &Lab, steering: &mut Steering, reason: &str) -> u64 {
    lab.wait(steering.counting().drops())
        .expect("counters")
        .by_reason()[reason]
}

/// Waits until more was dropped for `reason` than `before`.
fn until_dropped(lab: &Lab, steering: &mut Steering, reason: &str, before: u64) {
    let start = Instant::now();
    while drops(lab, steering, reason) <= before {
        let waited = start.elapsed();
        assert!(waited < HANG, "nothing dropped: {reason}");
    }
}

pub(crate) fn a_locked_connection_takes_nothing_in_plain(lab: &Lab) {
    let mut steering = lab.steered(&wish());
    for (_, there) in ENDS {
        let (near, mut far) = lab.connected(81, there);
        let on_bump = marks().bump(bump(1)) | marks().override_bit();
        mark(lab, &near, on_bump | marks().locked_bit());
        let before = drops(lab, &mut steering, "plain_in_locked");
        far.write_all(b"plain").expect("sent");
        until_dropped(lab, &mut steering, "plain_in_locked", before);
        near.set_nonblocking(true).expect("nonblocking");
        let peeked = near.peek(&mut [0; 5]);
        assert!(peeked.is_err(), "taken: {peeked:?}");
        // Unlocked, the far end's next attempt is taken.
        mark(lab, &near, on_bump);
        wait_for(&near, PollFlags::POLLIN, "data by the wire");
        assert_eq!(near.peek(&mut [0; 32]).expect("data"), 5);
    }
}

pub(crate) fn flags_of_no_connection_are_no_way_around(lab: &Lab) {
    let mut steering = lab.steered(&wish());
    for (here, there) in ENDS {
        let (from, to) = (address(there, 81), address(here, 4000));
        let raw = lab.on_peer(|| {
            let tcp = Some(Protocol::TCP);
            let raw = Socket::new(Domain::for_address(from), Type::RAW, tcp).expect("a socket");
            raw.bind(&SocketAddr::new(from.ip(), 0).into())
                .expect("bound");
            raw
        });
        for odd in [SYN | RST, FIN | RST | ACK, RST | URG | ACK] {
            let before = drops(lab, &mut steering, "plain_in_stray");
            let packet = segment(from, to, odd);
            // Without the IP header, which the kernel makes.
            let tcp = &packet[packet.len() - 20..];
            raw.send_to(tcp, &SocketAddr::new(to.ip(), 0).into())
                .expect("sent");
            until_dropped(lab, &mut steering, "plain_in_stray", before);
        }
    }
}

/// Everything to port 80 and from port 9000 has to take the bump.
fn required() -> Desired {
    let rule = |id| ClassRule {
        binding: Binding::Required,
        ..ClassRule::tcp(id, bump(1))
    };
    let rules = vec![
        ClassRule {
            dport: Some(80.into()),
            ..rule(1)
        },
        ClassRule {
            sport: Some(9000.into()),
            ..rule(2)
        },
    ];
    Desired { rules, ..wish() }
}

pub(crate) fn what_is_required_never_leaves_in_plain(lab: &Lab) {
    let free = Desired {
        rules: Vec::new(),
        ..wish()
    };
    let mut steering = lab.steered(&free);
    for (family, (_, there)) in ["iptables", "ip6tables"].into_iter().zip(ENDS) {
        lab.set(&mut steering, &free);
        // An explicit choice of plain does not stand against it.
        let (mut near, _far) = lab.connected(80, there);
        mark(lab, &near, marks().override_bit());
        lab.set(&mut steering, &required());
        near.write_all(b"required").expect("sent");
        assert_eq!(lab.tun_takes_data(), b"required");
        drop(near);

        // Nor does it leave where nothing marks it any more.
        lab.iptables(family, "-t mangle -F DIBS-STEER");
        let listener = lab.peer_listens(80, there);
        let before = drops(lab, &mut steering, "plain_out_required");
        let unmarked = connecting(address(there, 80), None);
        until_dropped(lab, &mut steering, "plain_out_required", before);
        drop(unmarked);
        for chain in ["DIBS-REQUIRED-OUT", "DIBS-REQUIRED-IN"] {
            lab.iptables(family, &format!("-t mangle -F {chain}"));
        }
        let unguarded = connecting(address(there, 80), None);
        let arrived = accept(&listener).peer_addr().expect("a peer");
        let local = unguarded.local_addr().expect("an address").as_socket();
        assert_eq!(Some(arrived), local, "the first that arrives is the last");
    }
}

pub(crate) fn what_is_required_is_never_taken_in_plain(lab: &Lab) {
    let mut steering = lab.steered(&required());
    for (here, there) in ENDS {
        let listener = TcpListener::bind(address(here, 9000)).expect("a listener");
        listener.set_nonblocking(true).expect("nonblocking");
        let before = drops(lab, &mut steering, "plain_in_required");
        let _plain = lab.on_peer(|| connecting(address(here, 9000), None));
        until_dropped(lab, &mut steering, "plain_in_required", before);
        assert!(listener.accept().is_err(), "a plain connection came about");
        // By the TUN it does; the answer takes it too.
        lab.tun_gives(&syn(address(there, 5555), address(here, 9000)));
        let answer = lab.tun_takes();
        assert_eq!(
            (answer.flags, answer.destination),
            (SYN | ACK, address(there, 5555))
        );
        // LOCKED from its first packet on, for what no address tells: ICMP errors.
        let entry = FlowKey::tcp(address(there, 5555), address(here, 9000));
        let mut conntrack = lab.open(Conntrack::open);
        let found = lab.wait(conntrack.get(&entry)).expect("a look");
        let locked = marks().bump(bump(1)) | marks().locked_bit();
        assert_eq!(found.expect("tracked").mark, locked);
    }
}

pub(crate) fn a_pinned_connection_outlives_its_entry(lab: &Lab) {
    let mut steering = lab.steered(&wish());
    for (_, there) in ENDS {
        let (near, mut far) = lab.connected(81, there);
        let (local, remote) = ends(&near);
        let mut desired = wish();
        desired.rules.push(ClassRule {
            dport: Some(remote.port().into()),
            sport: Some(local.port().into()),
            destination: Some(IpNet::from(remote.ip())),
            source: Some(IpNet::from(local.ip())),
            binding: Binding::Pinned,
            ..ClassRule::tcp(0, bump(1))
        });
        lab.set(&mut steering, &desired);
        // With a choice in its entry, that decides.
        mark(lab, &near, marks().bump(bump(1)) | marks().override_bit());
        far.write_all(b"first").expect("sent");
        wait_for(&near, PollFlags::POLLIN, "data by the wire");
        // Without, nothing comes in.
        lab.sh("conntrack -F 2>/dev/null");
        let before = drops(lab, &mut steering, "plain_in_stray");
        far.write_all(b"second").expect("sent");
        until_dropped(lab, &mut steering, "plain_in_stray", before);
        near.set_nonblocking(true).expect("nonblocking");
        assert_eq!(near.peek(&mut [0; 32]).expect("data"), 5);
    }
}
