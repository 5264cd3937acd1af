//! Messages as bytes, and back.

use super::*;
use proptest::prelude::*;

fn address() -> impl Strategy<Value = (IpAddr, IpAddr)> {
    prop_oneof![
        any::<([u8; 4], [u8; 4])>().prop_map(|(a, b)| (a.into(), b.into())),
        any::<([u8; 16], [u8; 16])>().prop_map(|(a, b)| (a.into(), b.into())),
    ]
}

fn named() -> impl Strategy<Value = Named> {
    let numbers = any::<(u16, u16, u32)>();
    (address(), numbers).prop_map(|((local, remote), (from, to, socket))| Named {
        pair: FlowKey::tcp((local, from), (remote, to)),
        socket: Socket(socket),
    })
}

fn body() -> impl Strategy<Value = Body> {
    let entries = proptest::collection::vec((named(), any::<u64>()), 1..=MAX_ENTRIES);
    let knocks = proptest::collection::vec((named(), any::<u64>()), 0..=MAX_ENTRIES);
    let stands = any::<(u32, u32, Option<(u32, u32)>)>();
    let matches = proptest::collection::vec((named(), stands), 0..=MAX_MATCHES);
    let named = || proptest::collection::vec(named(), 0..=MAX_ENTRIES);
    let outcomes = proptest::collection::vec((0u8..12, any::<u64>()), 0..=MAX_ENTRIES);
    let bump = (1u8..15).prop_filter_map("a bump", BumpId::new);
    let devices = proptest::collection::vec((bump.clone(), "[a-z.]{1,32}"), 0..=MAX_DEVICES);
    prop_oneof![
        (any::<(u64, u16)>(), devices).prop_map(|((sequence, bumps), devices)| Body::Want {
            sequence,
            bumps,
            devices,
        }),
        ((0u8..15, any::<([bool; 2], u8)>(), any::<u64>()), entries).prop_map(
            |(switch, entries)| {
                let (number, ([explicit, ready], ground), host) = switch;
                let grounds = [Ground::Proved, Ground::Forced, Ground::Renumbered];
                let version = |generation| Version { generation, host };
                Body::Switch {
                    switch: Switch {
                        bump: BumpId::new(number),
                        explicit,
                        ready,
                        ground: grounds[usize::from(ground % 3)],
                    },
                    conns: entries.into_iter().map(|(p, g)| (p, version(g))).collect(),
                }
            }
        ),
        (bump.clone(), named()).prop_map(|(bump, conns)| Body::Confirm { bump, conns }),
        named().prop_map(Body::Hide),
        (
            any::<u64>(),
            proptest::collection::vec((bump, any::<u16>(), any::<bool>()), 0..=MAX_SILENT)
        )
            .prop_map(|(sequence, ports)| Body::Silent {
                sequence,
                ports: ports
                    .into_iter()
                    .map(|(bump, port, refuses)| Port {
                        bump,
                        port,
                        refuses,
                    })
                    .collect(),
            }),
        knocks.prop_map(|knocks| {
            let knocks = knocks.into_iter();
            Body::Knock(knocks.map(|(n, w)| (n, Numbers::from_wire(w))).collect())
        }),
        matches.prop_map(|matches| {
            let matches = matches.into_iter();
            let stand = |(seq, ack, timestamps)| Stand {
                seq,
                ack,
                timestamps,
            };
            Body::Match(matches.map(|(n, s)| (n.pair, stand(s))).collect())
        }),
        proptest::collection::vec(any::<u16>(), 0..=MAX_SOUGHT).prop_map(Body::Seek),
        (
            any::<(u64, bool)>(),
            proptest::collection::vec(any::<u8>(), 0..=MAX_MEASURED)
        )
            .prop_map(|((run, named), paths)| Body::Measure { run, named, paths }),
        outcomes.prop_map(|outcomes| Body::Answer(
            outcomes
                .into_iter()
                .map(|(o, g)| (Outcome::from_wire(o).unwrap(), g))
                .collect()
        )),
    ]
}

proptest! {
    #[test]
    fn messages_come_back_and_fit(request: u32, body in body()) {
        let message = Message { request, body };
        let bytes = message.encode();
        prop_assert!(bytes.len() <= MAX_CONTROL);
        prop_assert_eq!(Message::decode(&bytes), Ok(message));
        for len in 0..bytes.len() {
            prop_assert_eq!(Message::decode(&bytes[..len]), Err(Malformed));
        }
    }

    #[test]
    fn any_bytes_are_a_message_or_none(bytes: Vec<u8>, kind in 1u8..=9) {
        let _ = Message::decode(&bytes);
        // Deeper than chance would get.
        let mut bytes = [&[VERSION, kind, 0, 0, 0, 9], bytes.as_slice()].concat();
        if let Ok(message) = Message::decode(&bytes) {
            prop_assert_eq!(message.encode(), bytes.as_slice());
        }
        bytes[0] = 2;
        prop_assert_eq!(Message::decode(&bytes), Err(Malformed));
    }
}

#[test]
fn a_release_has_these_bytes() {
    let version = Version {
        generation: 3,
        host: 0x0102_0304_0506_0708,
    };
    let named = Named {
        pair: crate::conns::tests::pair(),
        socket: Socket(77),
    };
    let message = Message {
        request: 9,
        body: Body::Switch {
            switch: Switch {
                bump: None,
                explicit: true,
                ready: false,
                ground: Ground::Proved,
            },
            conns: vec![(named, version)],
        },
    };
    let expected = [
        &[1, 2, 0, 0, 0, 9, 0, 1][..],
        &[1, 2, 3, 4, 5, 6, 7, 8, 1, 4],
        &[10, 0, 1, 1, 10, 0, 1, 2, 0x9c, 0x40, 0, 80],
        &[0, 0, 0, 77, 0, 0, 0, 0, 0, 0, 0, 3],
    ]
    .concat();
    assert_eq!(message.encode(), expected);
}

#[test]
fn silent_ports_have_these_bytes() {
    let port = |bump, port, refuses| Port {
        bump: BumpId::new(bump).unwrap(),
        port,
        refuses,
    };
    let message = Message {
        request: 9,
        body: Body::Silent {
            sequence: 4,
            ports: vec![port(1, 80, false), port(3, 5432, true)],
        },
    };
    let expected = [
        &[1, 5, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 4, 2][..],
        &[1, 0, 80, 0x83, 0x15, 0x38],
    ]
    .concat();
    assert_eq!(message.encode(), expected);
}

#[test]
fn a_measurement_has_these_bytes() {
    let message = Message {
        request: 9,
        body: Body::Measure {
            run: 4,
            named: true,
            paths: vec![0, 3],
        },
    };
    let expected = [1, 8, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 4, 1, 2, 0, 3];
    assert_eq!(message.encode(), expected);
}

/// It is the peer's doing that messages wait, or that of the trusted paths between us.
#[test]
fn messages_that_wait_are_no_fault_of_ours() {
    let full = Unanswered::from(ControlError::TooMany);
    assert_eq!(full, Unanswered::Full);
}
