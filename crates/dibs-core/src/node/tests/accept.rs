//! What a peer may open here, and what comes out of the TUN of what it tries.

use super::*;

/// An address of host 1 that no path's interface has.
const ELSEWHERE: [u8; 4] = [172, 17, 0, 1];

/// Two nodes, of which the second accepts this.
fn accepting(accept: Vec<Opening>) -> Pair {
    let mut pair = Pair::new();
    let elsewhere: IpAddr = ELSEWHERE.into();
    let mut config = [0, 1].map(|host| config(host, Integrity::On));
    config[0].peers[0].prefixes.push(IpNet::from(elsewhere));
    config[1].addresses.push(elsewhere);
    config[1].peers[0].accept = accept;
    pair.nodes = { config.into_iter().zip([1, 2]) }
        .map(|(config, seed)| Node::new(Time::ZERO, config, [seed; 32]).unwrap())
        .collect::<Vec<_>>()
        .try_into()
        .unwrap_or_else(|_| panic!("two of them"));
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    pair
}

/// What host 0's kernel sends.
#[derive(Clone, Copy)]
struct Sent {
    to: IpAddr,
    port: u16,
    from: u16,
    flags: u16,
    payload: &'static [u8],
    /// It says that the segment is signed (TCP-MD5), so it goes as it is.
    signed: bool,
}

impl Sent {
    fn syn(to: impl Into<IpAddr>, port: u16) -> Self {
        Self {
            to: to.into(),
            port,
            from: 40_000,
            flags: flags::SYN,
            payload: b"",
            signed: false,
        }
    }

    fn packet(self) -> Vec<u8> {
        const SIGNATURE: [u8; 20] = [
            19, 18, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 1, 1,
        ];
        let headers = Headers {
            tuple: FlowKey::tcp((inner(0), self.from), (self.to, self.port)),
            meta: IpMeta {
                tos: 0,
                ttl: 64,
                flow_label: 0,
            },
            seq: SeqNumber::new(1),
            ack: SeqNumber::new(5),
            flags: self.flags,
            window: WINDOW,
            urgent: 0,
            timestamps: None,
            options: self.signed.then_some(&SIGNATURE),
        };
        let mut packet = vec![0; headers.encoded_len() + self.payload.len()];
        let at = headers.encoded_len();
        let mut head = [0; MAX_HEADERS];
        headers.write(&mut head, self.payload.len(), 0);
        packet[..at].copy_from_slice(&head[..at]);
        packet[at..].copy_from_slice(self.payload);
        packet.drain(..virtio::LEN);
        packet
    }
}

/// How many packets come out at host 1 of one that goes in at host 0, and how many are refused there.
fn pass(pair: &mut Pair, packet: &[u8]) -> (usize, u64) {
    let refused = |pair: &Pair| pair.nodes[1].counters().get(Counter::ConnectionRefused);
    let before = refused(pair);
    let node = &mut pair.nodes[0];
    let mut buffer = node.tun_buffer();
    buffer[..virtio::LEN].fill(0);
    buffer[virtio::LEN..virtio::LEN + packet.len()].copy_from_slice(packet);
    node.handle_tun(pair.now, BUMP, buffer, virtio::LEN + packet.len());
    pair.run(Duration::from_millis(200));
    let came = std::mem::take(&mut pair.injected[1]).len();
    (came, refused(pair) - before)
}

const PASSED: (usize, u64) = (1, 0);
const REFUSED: (usize, u64) = (0, 1);

/// The forms in which a SYN may come: bare, with data, and as it is.
fn forms(syn: Sent) -> [Sent; 3] {
    let data = Sent {
        payload: b"early",
        from: syn.from + 1,
        ..syn
    };
    let signed = Sent {
        signed: true,
        from: syn.from + 2,
        ..syn
    };
    [syn, data, signed]
}

#[test]
fn connections_go_to_the_addresses_of_paths_unless_more_is_said() {
    let at = |address: [u8; 4], port| Opening {
        place: Place::Address(address.into()),
        first: port,
        last: port,
    };
    let ports = |first, last| Opening {
        place: Place::Paths,
        first,
        last,
    };
    let cases = [
        (vec![Opening::PATHS], [true, true, false, false]),
        (vec![Opening::ANY], [true; 4]),
        (vec![], [false; 4]),
        (vec![ports(80, 80)], [true, false, false, false]),
        (
            vec![ports(22, 25), ports(81, 90)],
            [false, true, false, false],
        ),
        (vec![at(ELSEWHERE, 80)], [false, false, true, false]),
        (
            vec![Opening::PATHS, at(ELSEWHERE, 81)],
            [true, true, false, true],
        ),
    ];
    for (accept, expected) in cases {
        let said = format!("{accept:?}");
        let mut pair = accepting(accept);
        let ends = [
            (inner(1), 80),
            (inner(1), 81),
            (ELSEWHERE.into(), 80),
            (ELSEWHERE.into(), 81),
        ];
        for ((to, port), passes) in ends.into_iter().zip(expected) {
            for (form, sent) in forms(Sent::syn(to, port)).into_iter().enumerate() {
                let expected = if passes { PASSED } else { REFUSED };
                let came = pass(&mut pair, &sent.packet());
                assert_eq!(
                    came, expected,
                    "form {form} to {to} port {port}, accepting {said}"
                );
            }
        }
    }
}

/// A bump was put into a connection under way, and one that this host itself opened: neither begins here.
#[test]
fn connections_under_way_and_answers_pass_wherever_they_belong() {
    let mut pair = accepting(vec![]);
    for flags in [
        flags::ACK,
        flags::SYN | flags::ACK,
        flags::RST,
        flags::FIN | flags::ACK,
    ] {
        let sent = Sent {
            flags,
            from: 41_000 + flags,
            ..Sent::syn(ELSEWHERE, 80)
        };
        assert_eq!(pass(&mut pair, &sent.packet()), PASSED, "flags {flags:#x}");
    }
}

/// A flow that was opened without a SYN to where the peer may open nothing, and a SYN in it then.
#[test]
fn a_flow_that_is_known_is_no_way_around() {
    let mut pair = accepting(vec![Opening::PATHS]);
    let ack = Sent {
        flags: flags::ACK,
        ..Sent::syn(ELSEWHERE, 80)
    };
    assert_eq!(pass(&mut pair, &ack.packet()), PASSED);
    assert_eq!(pass(&mut pair, &Sent::syn(ELSEWHERE, 80).packet()), REFUSED);
}

/// The interface that had the address is no path's any more, or became one's.
#[test]
fn addresses_of_paths_come_and_go() {
    let mut pair = accepting(vec![Opening::PATHS]);
    let (old, new) = (
        Sent::syn(inner(1), 80).packet(),
        Sent::syn(ELSEWHERE, 80).packet(),
    );
    assert_eq!(
        [pass(&mut pair, &old), pass(&mut pair, &new)],
        [PASSED, REFUSED]
    );
    pair.nodes[1].set_reachable(vec![ELSEWHERE.into()]);
    assert_eq!(
        [pass(&mut pair, &old), pass(&mut pair, &new)],
        [REFUSED, PASSED]
    );
}

/// Where the flags stand behind what a first fragment has, or in one that would be written over it, nobody can tell
/// whether it begins a connection.
#[test]
fn fragments_hide_no_beginning() {
    let mut pair = accepting(vec![Opening::PATHS]);
    let fragment = |packet: &[u8], at: usize, len: usize| {
        let mut piece = [&packet[..20], &packet[20 + at..20 + at + len]].concat();
        let total = piece.len() as u16;
        piece[2..4].copy_from_slice(&total.to_be_bytes());
        let more = 20 + at + len < packet.len();
        let field = (at / 8) as u16 | if more { 0x2000 } else { 0 };
        piece[6..8].copy_from_slice(&field.to_be_bytes());
        piece
    };
    let data = Sent {
        payload: &[7; 100],
        ..Sent::syn(ELSEWHERE, 80)
    };
    let syn = data.packet();
    assert_eq!(pass(&mut pair, &fragment(&syn, 0, 48)), REFUSED);
    assert_eq!(pass(&mut pair, &fragment(&syn, 0, 8)), REFUSED);
    assert_eq!(pass(&mut pair, &fragment(&syn, 8, 16)), REFUSED);
    let ack = Sent {
        flags: flags::ACK,
        ..data
    };
    let ack = ack.packet();
    assert_eq!(pass(&mut pair, &fragment(&ack, 0, 48)), PASSED);
    assert_eq!(pass(&mut pair, &fragment(&ack, 48, 72)), PASSED);
    let here = Sent {
        to: inner(1),
        ..data
    };
    assert_eq!(pass(&mut pair, &fragment(&here.packet(), 0, 48)), PASSED);
}
