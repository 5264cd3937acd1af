//! Vectors of frames, acknowledgements and the scrambler alone.

use std::net::IpAddr;

use dibs_core::path::{AckFrame, SeqRange};
use dibs_scramble::{BUFFER_LEN, Scrambler};
use dibs_wire::bytes::Writer;
use dibs_wire::frame::{
    self, BASE_OFFSET, Chunk, EmptySegment, FlowId, Frame, Frames, Open, Share, TcpFields,
};
use dibs_wire::packet::{IpMeta, flags};
use dibs_wire::{FlowKey, SeqNumber};

use crate::session::plaintext;
use crate::{Vector, documented};

/// TCP fields of a segment of bulk data.
pub(crate) fn fields() -> TcpFields<'static> {
    TcpFields {
        flags: flags::ACK | flags::PSH,
        window: 502,
        ack: SeqNumber::new(0x5152_5354),
        timestamps: Some((0x6162_6364, 0x7172_7374)),
        meta: None,
        options: None,
        urgent: None,
    }
}

/// How the flow of the vectors is opened.
pub(crate) fn open(session: u64) -> Open {
    Open {
        bump: 1,
        tuple: FlowKey::tcp(
            (IpAddr::from([10, 0, 1, 1]), 40_000),
            (IpAddr::from([10, 0, 1, 2]), 443),
        ),
        meta: IpMeta {
            tos: 0,
            ttl: 64,
            flow_label: 0,
        },
        base_seq: SeqNumber::new(0x4142_4344),
        session,
    }
}

fn open_v6(session: u64) -> Open {
    let host = |last| IpAddr::from([0xfd00, 1, 0, 0, 0, 0, 0, last]);
    let open = open(session);
    Open {
        tuple: FlowKey {
            src: host(1),
            dst: host(2),
            ..open.tuple
        },
        meta: IpMeta {
            flow_label: 0xabcde,
            ..open.meta
        },
        ..open
    }
}

/// Acknowledges 1,000 to 1,005, 990 to 997, and 1, a quarter of a millisecond late.
fn ack_body() -> Vec<u8> {
    let range = |start, end| SeqRange { start, end };
    let ranges = [range(1000, 1005), range(990, 997), range(1, 1)];
    let frame = AckFrame::new(250, &ranges).expect("descending and apart");
    let mut body = Vec::new();
    frame.encode(&mut body);
    assert_eq!(AckFrame::decode(&body).as_ref(), Ok(&frame));
    body
}

#[expect(clippy::too_many_lines, reason = "a table of frames")]
fn frames<'a>(ack: &'a [u8]) -> Vec<(&'static str, Frame<'a>)> {
    let chunk = Chunk {
        flow: FlowId::new(7),
        incarnation: 1,
        solo: false,
        ahead: 0,
        first: false,
        detached: false,
        withheld: false,
        epoch: 1,
        offset: BASE_OFFSET + 130,
        crc: 0x8182_8384,
        tcp: fields(),
        open: None,
    };
    let solo = Chunk {
        solo: true,
        ahead: 40_000,
        tcp: TcpFields {
            flags: flags::ACK | flags::URG,
            timestamps: None,
            meta: Some(IpMeta {
                tos: 0x03,
                ttl: 63,
                flow_label: 0,
            }),
            urgent: Some(5),
            ..fields()
        },
        ..chunk
    };
    let segment = EmptySegment {
        flow: FlowId::new(7),
        incarnation: 1,
        seq: SeqNumber::new(0x4142_4344),
        tcp: TcpFields {
            flags: flags::SYN,
            ack: SeqNumber::new(0),
            timestamps: None,
            options: Some(&[2, 4, 5, 180, 4, 2, 1, 1]),
            ..fields()
        },
        open: Some(open_v6(0x9192_9394_9596_9798)),
    };
    let (nonce, challenge) = (*b"nonce-01", *b"challeng");
    vec![
        ("frame_ping", Frame::Ping),
        ("frame_ping_spent", Frame::PingSpent),
        ("frame_ack", Frame::Ack(ack)),
        ("frame_chunk", Frame::Chunk(chunk)),
        ("frame_chunk_solo", Frame::Chunk(solo)),
        ("frame_segment_open", Frame::Segment(segment)),
        (
            "frame_opaque",
            Frame::Opaque {
                bump: 1,
                packet: b"packet",
            },
        ),
        (
            "frame_fragment",
            Frame::Fragment {
                id: 3,
                at: 1151,
                total: 1400,
                header: 43,
                bytes: b"piece",
            },
        ),
        (
            "frame_share",
            Frame::Share(Share {
                fleeting: false,
                bump: 2,
                set: 0x6162_6364,
                index: 1,
                needed: 2,
                shares: 3,
            }),
        ),
        (
            "frame_control",
            Frame::Control {
                id: 5,
                bytes: b"message",
            },
        ),
        (
            "frame_flow_unknown",
            Frame::FlowUnknown {
                flow: FlowId::new(7),
                incarnation: 1,
            },
        ),
        (
            "frame_epoch_broken",
            Frame::EpochBroken {
                flow: FlowId::new(7),
                incarnation: 1,
                epoch: 2,
            },
        ),
        (
            "frame_path_join",
            Frame::PathJoin {
                nonce,
                trusted: true,
                to: [192, 0, 2, 1].into(),
            },
        ),
        (
            "frame_path_accept",
            Frame::PathAccept {
                nonce,
                challenge,
                trusted: false,
            },
        ),
        ("frame_path_confirm", Frame::PathConfirm { challenge }),
        ("frame_path_challenge", Frame::PathChallenge { challenge }),
        ("frame_path_response", Frame::PathResponse { challenge }),
    ]
}

fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    let mut buffer = [0; 256];
    let mut w = Writer::new(&mut buffer);
    frame::encode(frame, &mut w);
    let length = w.len();
    buffer[..length].to_vec()
}

pub(crate) fn vectors() -> Vec<Vector> {
    let ack = ack_body();
    let mut zeros = plaintext();
    Scrambler::new(&[0; BUFFER_LEN]).scramble_in_place(&mut zeros);
    let mut vectors: Vec<Vector> = frames(&ack)
        .into_iter()
        .map(|(name, frame)| (name, encoded(&frame)))
        .collect();
    vectors.push(("scrambled_from_zeros", zeros));
    vectors.push(("ack_body", ack));
    vectors
}

#[test]
fn documented_frames_are_read_as_what_they_say() {
    let documented = documented();
    let ack = ack_body();
    for (name, frame) in frames(&ack) {
        let bytes = documented.get(name).unwrap_or_else(|| panic!("no {name}"));
        let read: Vec<_> = Frames::new(bytes).collect();
        assert_eq!(read, [Ok(frame)], "{name}");
    }
}
