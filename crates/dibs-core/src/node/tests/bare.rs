//! `integrity = "off"`: what it gives up, and what it does not (docs/protocol.md, 9).

use std::cell::RefCell;
use std::rc::Rc;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Chunk, EmptySegment, Frame, Frames, Open};

use super::*;

const SIZE: usize = 50_000;

/// A pair in the midst of a stream, and the bare datagrams of it that did not arrive.
fn swallowed() -> (Pair, Vec<Vec<u8>>) {
    let mut pair = Pair::with(Integrity::Off);
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    let data = text(SIZE);
    for part in 0..4 {
        pair.send(0, 1 + part * SIZE as u32, &data, 0, part);
        pair.run(Duration::from_millis(20));
    }
    let heard = Rc::new(RefCell::new(Vec::new()));
    let tap = heard.clone();
    pair.filter = Box::new(move |host, _, bytes| {
        let bare = host == 0 && bytes[0] == 6;
        if bare {
            tap.borrow_mut().push(bytes.to_vec());
        }
        !bare
    });
    pair.send(0, 1 + 4 * SIZE as u32, &data, 0, 4);
    pair.outputs();
    let heard = heard.take();
    assert!(heard.len() > 5, "{}", heard.len());
    (pair, heard)
}

fn parts(bare: &[u8]) -> (&[u8], &[u8]) {
    let header = usize::from(u16::from_be_bytes([bare[2], bare[3]]));
    bare[16..].split_at(bare.len() - 16 - header)
}

fn chunk_of(header: &[u8]) -> Chunk<'_> {
    match Frames::new(header).next() {
        Some(Ok(Frame::Chunk(chunk))) => chunk,
        other => panic!("{other:?}"),
    }
}

/// The same clear header in front of other content.
fn forged(like: &[u8], payload: &[u8], frame: &Frame<'_>) -> Vec<u8> {
    let mut block = [0; 400];
    let mut w = Writer::new(&mut block);
    frame::encode(frame, &mut w);
    let len = w.len();
    let mut datagram = like[..16].to_vec();
    datagram[2..4].copy_from_slice(&(len as u16).to_be_bytes());
    datagram.extend(payload);
    datagram.extend(&block[..len]);
    datagram
}

/// Hands a datagram to host 1 as one of host 0's on its path.
fn deliver(pair: &mut Pair, datagram: &[u8]) {
    let links = &pair.nodes[1].peers[0].paths;
    let path = links
        .iter()
        .find(|l| l.id.get() == datagram[1])
        .unwrap()
        .local
        .get();
    let mut copy = datagram.to_vec();
    pair.nodes[1].handle_datagram(pair.now, path, addr(0, path), &mut copy);
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of attacks")]
fn nothing_but_data_of_an_open_flow_passes_bare() {
    let (mut pair, heard) = swallowed();
    let like = &heard[2];
    let (payload, header) = parts(like);
    let chunk = chunk_of(header);
    assert!(!chunk.solo && !chunk.first && chunk.open.is_none());
    let open = Open {
        bump: BUMP.get(),
        tuple: tuple(0),
        meta: IpMeta {
            tos: 0,
            ttl: 64,
            flow_label: 0,
        },
        base_seq: SeqNumber::new(1),
        session: 0,
    };
    let with_flags = |bits| {
        let mut other = chunk;
        other.tcp.flags |= bits;
        Frame::Chunk(other)
    };
    let challenge = [1; 8];
    let nonce = [2; 8];
    let frames = [
        Frame::Ping,
        // Numbers that were sent, as far as host 1 knows.
        Frame::Ack(&[0, 0, 0, 0]),
        Frame::Chunk(Chunk {
            solo: true,
            ahead: 0,
            ..chunk
        }),
        Frame::Chunk(Chunk {
            first: true,
            epoch: chunk.epoch + 1,
            ..chunk
        }),
        Frame::Chunk(Chunk {
            open: Some(open),
            incarnation: chunk.incarnation + 1,
            ..chunk
        }),
        with_flags(flags::RST),
        with_flags(flags::FIN),
        with_flags(flags::SYN),
        Frame::Segment(EmptySegment {
            flow: chunk.flow,
            incarnation: chunk.incarnation,
            seq: SeqNumber::new(1),
            tcp: chunk.tcp,
            open: None,
        }),
        Frame::Opaque {
            bump: BUMP.get(),
            packet: &[0x45; 40],
        },
        Frame::Fragment {
            id: 2,
            at: 0,
            total: 40,
            header: 0,
            bytes: &[1; 20],
        },
        Frame::Control {
            id: 7,
            bytes: b"SWITCH",
        },
        Frame::FlowUnknown {
            flow: chunk.flow,
            incarnation: chunk.incarnation,
        },
        Frame::EpochBroken {
            flow: chunk.flow,
            incarnation: chunk.incarnation,
            epoch: chunk.epoch,
        },
        Frame::PathJoin {
            nonce,
            trusted: true,
            to: addr(1, 1).ip(),
        },
        Frame::PathAccept {
            nonce,
            challenge,
            trusted: true,
        },
        Frame::PathConfirm { challenge },
        Frame::PathChallenge { challenge },
        Frame::PathResponse { challenge },
    ];
    let refused = |pair: &Pair| pair.nodes[1].counters().get(Counter::BareRefused);
    let events = pair.events[1].len();
    let injected = pair.injected[1].len();
    let mut expected = refused(&pair);
    for (at, frame) in frames.iter().enumerate() {
        deliver(&mut pair, &forged(like, payload, frame));
        expected += 1;
        assert_eq!(refused(&pair), expected, "frame {at}: {frame:?}");
    }
    // A chunk without bytes has nothing to say either.
    deliver(&mut pair, &forged(like, b"", &Frame::Chunk(chunk)));
    assert_eq!(refused(&pair), expected + 1);
    pair.nodes[1].flush_injections();
    assert!(pair.nodes[1].poll_injection().is_none());
    assert!(pair.nodes[1].poll_event().is_none());
    assert_eq!(
        (pair.events[1].len(), pair.injected[1].len()),
        (events, injected)
    );

    // The true ones are taken.
    for datagram in &heard {
        deliver(&mut pair, datagram);
    }
    assert_eq!(refused(&pair), expected + 1);
}

#[test]
fn bare_data_comes_only_from_where_the_peer_is_and_moves_no_endpoint() {
    let (mut pair, heard) = swallowed();
    let before: Vec<_> = pair.nodes[1].paths().iter().map(|p| p.remote).collect();
    let refused = |pair: &Pair| pair.nodes[1].counters().get(Counter::BareRefused);
    let at_first = refused(&pair);
    let elsewhere: SocketAddr = "10.0.2.66:1".parse().unwrap();
    for datagram in &heard {
        let links = &pair.nodes[1].peers[0].paths;
        let path = links
            .iter()
            .find(|l| l.id.get() == datagram[1])
            .unwrap()
            .local
            .get();
        let mut copy = datagram.clone();
        pair.nodes[1].handle_datagram(pair.now, path, elsewhere, &mut copy);
    }
    assert_eq!(refused(&pair), at_first + heard.len() as u64);
    let after: Vec<_> = pair.nodes[1].paths().iter().map(|p| p.remote).collect();
    assert_eq!(after, before);
    assert_eq!(pair.nodes[1].counters().get(Counter::EndpointChallenged), 0);
}

#[test]
fn tampered_data_is_counted_and_never_handed_on() {
    let (mut pair, heard) = swallowed();
    pair.send_ack(1, 1);
    let before = pair.injected[1].len();
    for datagram in &heard {
        let mut tampered = datagram.clone();
        tampered[20] ^= 1;
        deliver(&mut pair, &tampered);
    }
    let wrong = pair.nodes[1].counters().get(Counter::CrcMismatch);
    assert!(wrong > 0);
    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(1));
    let data = text(SIZE);
    for (seq, payload, ..) in &pair.received(1)[before..] {
        let at = (*seq as usize - 1) % SIZE;
        assert!(data[at..].starts_with(payload), "at {seq}");
    }
    // The connection goes on in another epoch: TCP sends again what is missing.
    pair.send(0, 1 + 4 * SIZE as u32, &data, 0, 5);
    pair.run(Duration::from_secs(1));
    let got = pair.received(1);
    let mut have = vec![false; SIZE];
    for (seq, payload, ..) in got {
        if let Some(at) = (seq as usize - 1).checked_sub(4 * SIZE) {
            have[at..at + payload.len()].fill(true);
        }
    }
    assert!(have.iter().all(|byte| *byte));
}

#[test]
fn forged_data_fills_no_more_than_the_store() {
    let (mut pair, heard) = swallowed();
    let like = &heard[2];
    let (payload, header) = parts(like);
    let chunk = chunk_of(header);
    for ahead in 1..30_000 {
        let far = Frame::Chunk(Chunk {
            offset: chunk.offset + ahead * payload.len() as u64,
            ..chunk
        });
        deliver(&mut pair, &forged(like, payload, &far));
    }
    let held = pair.nodes[1].peers(pair.now)[0].held;
    assert!(held > 16 << 20 && held <= 32 << 20, "{held}");
    assert!(pair.nodes[1].counters().get(Counter::StoreFull) > 0);
    // It is let go of at the latest when the connection has been silent for a while.
    pair.run(Duration::from_secs(100));
    assert_eq!(pair.nodes[1].peers(pair.now)[0].held, 0);
}

#[test]
fn forged_numbers_spoil_acknowledgements_only_while_they_come() {
    let (mut pair, heard) = swallowed();
    let like = &heard[2];
    let (payload, header) = parts(like);
    let chunk = chunk_of(header);
    let number = u64::from_be_bytes(like[8..16].try_into().unwrap());
    let refused = |pair: &Pair| pair.nodes[1].counters().get(Counter::BareRefused);
    for step in 0..100 {
        let mut datagram = forged(like, payload, &Frame::Chunk(chunk));
        datagram[8..16].copy_from_slice(&(number + step * 1000).to_be_bytes());
        deliver(&mut pair, &datagram);
    }
    assert!(refused(&pair) > 90, "the far future is not believed");
    pair.filter = Box::new(|_, _, _| true);
    let data = text(SIZE);
    for round in 0..400 {
        pair.send(0, 1 + (5 + round) * SIZE as u32, &data, 0, 6 + round);
        pair.run(Duration::from_millis(20));
    }
    pair.assert_open();
}
