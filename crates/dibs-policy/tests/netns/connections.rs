//! Single connections: moved, kept, followed, found.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use dibs_policy::ClassRule;
use dibs_policy::conntrack::{Conntrack, Event, Events};
use dibs_policy::sockets::{self, TcpSocket};
use dibs_wire::FlowKey;
use nix::poll::PollFlags;

use crate::lab::{ENDS, Lab, address, bump, connecting, marks, wait_for, wish};
use crate::packet::syn;

fn tuple(stream: &TcpStream) -> FlowKey {
    FlowKey::tcp(
        stream.local_addr().expect("an address"),
        stream.peer_addr().expect("a peer"),
    )
}

/// Sets bits of the stream's ctmark; the whole mark after it.
fn set(lab: &Lab, stream: &TcpStream, value: u32, mask: u32) -> u32 {
    let mut conntrack = lab.open(Conntrack::open);
    assert!(
        lab.wait(conntrack.set_mark(&tuple(stream), value, mask))
            .expect("set"),
        "tracked"
    );
    let found = lab.wait(conntrack.get(&tuple(stream))).expect("a look");
    found.expect("tracked").mark
}

fn arrives(stream: &mut TcpStream, expected: &[u8]) {
    wait_for(stream, PollFlags::POLLIN, "data by the wire");
    let mut buffer = vec![0; expected.len()];
    stream.read_exact(&mut buffer).expect("data");
    assert_eq!(buffer, expected);
}

pub(crate) fn a_live_connection_moves_and_returns(lab: &Lab) {
    lab.steered(&wish());
    let chosen = marks().override_bit() | marks().bump(bump(1));
    for (_, there) in ENDS {
        let (mut near, mut far) = lab.connected(81, there);
        near.write_all(b"plain").expect("sent");
        arrives(&mut far, b"plain");

        assert_eq!(set(lab, &near, 0x42, 0xff), 0x42);
        let mark = set(lab, &near, chosen, marks().mask());
        assert_eq!(mark, chosen | 0x42, "bits of others stay");
        near.write_all(b"bumped").expect("sent");
        assert_eq!(lab.tun_takes_data(), b"bumped");

        // Back to plain: TCP sends again what the TUN swallowed.
        set(lab, &near, marks().override_bit(), marks().mask());
        arrives(&mut far, b"bumped");
    }
    let gone = FlowKey::tcp(address("10.7.1.1", 1), address("10.7.1.2", 2));
    let mut conntrack = lab.open(Conntrack::open);
    assert!(
        !lab.wait(conntrack.set_mark(&gone, 1, 1))
            .expect("an answer"),
        "not tracked"
    );
}

pub(crate) fn a_moved_connection_outlives_its_interface(lab: &Lab) {
    lab.steered(&wish());
    for ((here, there), (family, last)) in ENDS.into_iter().zip([("-4", "24"), ("-6", "64")]) {
        let (mut near, _far) = lab.connected(81, there);
        set(lab, &near, marks().bump(bump(1)), marks().bump_mask());
        lab.sh(&format!("ip {family} addr del {here}/{last} dev veth0"));
        near.write_all(b"still here").expect("sent");
        assert_eq!(lab.tun_takes_data(), b"still here");
        // In by the TUN still works too, with no other route back.
        let _listener = TcpListener::bind(address(here, 9000)).expect("a listener");
        lab.tun_gives(&syn(address(there, 5555), address(here, 9000)));
        while lab.tun_takes().destination != address(there, 5555) {}
    }
}

pub(crate) fn an_explicit_choice_outranks_class_rules(lab: &Lab) {
    let mut wish = wish();
    wish.rules.clear();
    let mut steering = lab.steered(&wish);
    for (_, there) in ENDS {
        let (mut moved, _far) = lab.connected(80, there);
        let (mut kept, mut far) = lab.connected(81, there);
        set(lab, &kept, marks().override_bit(), marks().mask());
        // A rule applies to established connections at once, but not against a choice.
        let rules = vec![ClassRule::tcp(1, bump(1))];
        lab.set(
            &mut steering,
            &dibs_policy::Desired {
                rules,
                ..wish.clone()
            },
        );
        moved.write_all(b"by rule").expect("sent");
        assert_eq!(lab.tun_takes_data(), b"by rule");
        kept.write_all(b"by choice").expect("sent");
        arrives(&mut far, b"by choice");
        lab.set(&mut steering, &wish);
        drop((moved, kept));
    }
}

pub(crate) fn events_and_sockets_tell_of_a_connection(lab: &Lab) {
    lab.steered(&wish());
    for (_, there) in ENDS {
        let mut events = lab.open(Events::open);
        let (near, _far) = lab.connected(81, there);
        let ours = tuple(&near);
        lab.wait(async {
            until(
                &mut events,
                |event| matches!(event, Event::New(c) if c.original == ours),
            )
            .await;
        });
        set(lab, &near, marks().bump(bump(1)), marks().mask());
        let marked = marks().bump(bump(1));
        lab.wait(until(
            &mut events,
            |event| matches!(event, Event::Update(c) if c.original == ours && c.mark == marked),
        ));
        let listed = lab
            .wait(lab.open(Conntrack::open).list(Some))
            .expect("a list");
        let found = listed.iter().find(|c| c.original == ours).expect("listed");
        assert_eq!(
            (found.mark, found.reply.source()),
            (marked, ours.destination())
        );
        lab.sh("conntrack -F 2>/dev/null");
        lab.wait(until(
            &mut events,
            |event| matches!(event, Event::Destroyed(c) if c.original == ours),
        ));

        let listed = lab.wait(sockets::list(Some)).expect("a list");
        let socket = listed.iter().find(|s| s.key == ours).expect("listed");
        assert_eq!(socket.state, 1);
        assert_eq!(socket.uid, nix::unistd::getuid().as_raw());
        assert!(socket.counts.is_some_and(|counts| counts.rtt_us > 0));
        let absent = FlowKey::tcp(ours.source(), address(there, 9));
        let found = lab.wait(sockets::find(&[absent, ours]));
        let found = found.expect("an answer");
        let named = |socket: &TcpSocket| {
            let TcpSocket { cookie, inode, .. } = *socket;
            (socket.key, inode, cookie)
        };
        assert_ne!(socket.cookie, 0);
        assert_eq!(found.iter().map(named).collect::<Vec<_>>(), [named(socket)]);
        let holders = sockets::processes(&HashSet::from([socket.inode]));
        assert_eq!(holders[&socket.inode].pid, std::process::id());

        let bound = connecting(address(there, 82), Some("veth0"));
        let local = bound.local_addr().expect("an address").as_socket();
        let listed = lab.wait(sockets::list(Some)).expect("a list");
        let found = listed.iter().find(|s| Some(s.key.source()) == local);
        // Refused at once where the peer's answer was quicker than we.
        assert!(found.is_none_or(|socket| socket.bound_device > 0));
        if let Some(bound) = found {
            let found = lab.wait(sockets::find(&[bound.key]));
            let device = |socket: &TcpSocket| socket.bound_device;
            // Refused meanwhile, perhaps.
            assert!(
                found
                    .expect("an answer")
                    .iter()
                    .map(device)
                    .all(|device| device > 0)
            );
        }
    }
}

async fn until(events: &mut Events, wanted: impl Fn(&Event) -> bool) {
    while !wanted(&events.next().await.expect("an event")) {}
}
