use super::*;
use crate::bytes::Writer;

fn open(v6: bool) -> Open {
    let (src, dst) = if v6 {
        ("[fd00::1]:1", "[fd00::2]:2")
    } else {
        ("10.0.0.1:1", "10.0.0.2:2")
    };
    let end = |text: &str| text.parse::<core::net::SocketAddr>().unwrap();
    Open {
        bump: 1,
        tuple: FlowKey::tcp(end(src), end(dst)),
        meta: IpMeta {
            tos: 1,
            ttl: 64,
            flow_label: 0x12345,
        },
        base_seq: SeqNumber::new(9),
        session: 11,
    }
}

fn fields() -> TcpFields<'static> {
    TcpFields {
        flags: 0x118,
        window: 7,
        ack: SeqNumber::new(3),
        timestamps: Some((5, 6)),
        meta: Some(IpMeta {
            tos: 3,
            ttl: 1,
            flow_label: 0,
        }),
        options: Some(&[1, 1, 1, 0]),
        urgent: Some(12),
    }
}

fn bare() -> TcpFields<'static> {
    TcpFields {
        timestamps: None,
        meta: None,
        options: None,
        urgent: None,
        ..fields()
    }
}

fn samples() -> Vec<Frame<'static>> {
    let chunk = |tcp, open, solo: bool, withheld: bool| {
        Frame::Chunk(Chunk {
            flow: FlowId::new(1),
            incarnation: 2,
            solo,
            ahead: if solo { 70_000 } else { 0 },
            first: !solo && !withheld,
            detached: !solo && !withheld,
            withheld,
            epoch: 3,
            offset: BASE_OFFSET + 4,
            crc: 5,
            tcp,
            open,
        })
    };
    let segment = |tcp, open| {
        Frame::Segment(EmptySegment {
            flow: FlowId::new(1),
            incarnation: 2,
            seq: SeqNumber::new(3),
            tcp,
            open,
        })
    };
    vec![
        Frame::Ping,
        Frame::PingSpent,
        Frame::Ack(&[1, 2, 3]),
        chunk(fields(), Some(open(false)), true, false),
        chunk(bare(), None, false, false),
        chunk(bare(), None, false, true),
        segment(fields(), Some(open(true))),
        segment(bare(), None),
        Frame::Opaque {
            bump: 3,
            packet: &[0x45; 30],
        },
        Frame::Fragment {
            id: 1,
            at: 2,
            total: 3,
            header: 4,
            bytes: &[9; 9],
        },
        Frame::Share(Share {
            fleeting: false,
            bump: 2,
            set: 0x0102_0304,
            index: 1,
            needed: 2,
            shares: 3,
        }),
        Frame::Share(Share {
            fleeting: true,
            bump: 2,
            set: 5,
            index: 2,
            needed: 3,
            shares: 3,
        }),
        Frame::Control {
            id: 7,
            bytes: b"engage",
        },
        Frame::FlowUnknown {
            flow: FlowId::new(1),
            incarnation: 2,
        },
        Frame::EpochBroken {
            flow: FlowId::new(1),
            incarnation: 2,
            epoch: 3,
        },
        Frame::PathJoin {
            nonce: [1; 8],
            trusted: true,
            to: [192, 0, 2, 1].into(),
        },
        Frame::PathJoin {
            nonce: [1; 8],
            trusted: false,
            to: [0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into(),
        },
        Frame::PathAccept {
            nonce: [1; 8],
            challenge: [2; 8],
            trusted: false,
        },
        Frame::PathConfirm { challenge: [3; 8] },
        Frame::PathChallenge { challenge: [4; 8] },
        Frame::PathResponse { challenge: [5; 8] },
    ]
}

#[test]
fn what_is_written_is_read() {
    let mut buf = [0u8; 2048];
    let mut w = Writer::new(&mut buf);
    for frame in samples() {
        encode(&frame, &mut w);
        w.u8(PADDING);
    }
    let len = w.len();
    let read: Vec<_> = Frames::new(&buf[..len]).map(Result::unwrap).collect();
    assert_eq!(read, samples());
}

#[test]
fn lengths_are_as_announced() {
    let mut buf = [0u8; 256];
    for tcp in [fields(), bare()] {
        for open in [None, Some(open(false)), Some(open(true))] {
            for solo in [false, true] {
                let mut w = Writer::new(&mut buf);
                Chunk {
                    tcp,
                    solo,
                    open,
                    ..Chunk::EMPTY
                }
                .encode(&mut w);
                assert_eq!(w.len(), chunk_len(&tcp, solo, open.as_ref()));
            }
            let mut w = Writer::new(&mut buf);
            EmptySegment {
                flow: FlowId::new(0),
                incarnation: 0,
                seq: SeqNumber::new(0),
                tcp,
                open,
            }
            .encode(&mut w);
            assert_eq!(w.len(), segment_len(&tcp, open.as_ref()));
        }
    }
}

#[test]
fn every_truncation_is_an_error() {
    for frame in samples() {
        let mut buf = [0u8; 256];
        let mut w = Writer::new(&mut buf);
        encode(&frame, &mut w);
        let len = w.len();
        for cut in 1..len {
            let last = Frames::new(&buf[..cut]).last().unwrap();
            assert!(last.is_err(), "{frame:?} cut to {cut}");
        }
    }
}

#[test]
fn arbitrary_bytes_never_panic() {
    let mut state = 3u64;
    for _ in 0..200_000 {
        let mut bytes = [0u8; 96];
        for b in &mut bytes {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            *b = (state >> 33) as u8;
        }
        bytes[0] &= 0x37;
        for frame in Frames::new(&bytes) {
            let _ = frame;
        }
    }
}
