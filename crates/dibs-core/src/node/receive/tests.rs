//! What only a peer that has gone mad, or bad, would say.

use dibs_settings::BumpId;
use dibs_wire::packet::IpMeta;
use dibs_wire::{SeqNumber, checksum};

use std::net::IpAddr;

use dibs_wire::frame::{self, Chunk, FlowId, Frame, Open, TcpFields};
use dibs_wire::packet;

use crate::counters::Counter;
use crate::node::Node;
use crate::node::protection::Protection;
use crate::node::shared::Shared;
use crate::node::tests::{BUMP, Pair, inner, tuple};
use crate::path_index::PathIndex;

/// Gives host 1 a chunk that restores, and that opens its flow.
fn solo_chunk(pair: &mut Pair, offset: u64, len: usize) {
    let now = pair.now;
    let Node { shared, peers, .. } = &mut pair.nodes[1];
    let peer = &mut peers[0];
    let secrets = peer.association.newest_secrets();
    let (flow, incarnation, epoch) = (FlowId::new(7), 0, 1);
    let key = secrets
        .epoch_key(crate::session::Direction::Incoming, flow, 0, epoch)
        .solo(offset);
    let plain = vec![42; len];
    let mut bytes = plain.clone();
    dibs_scramble::Scrambler::new(&dibs_scramble::initial_buffer(&key.initial_mac()))
        .scramble_in_place(&mut bytes);
    let meta = IpMeta {
        tos: 0,
        ttl: 64,
        flow_label: 0,
    };
    let open = Open {
        bump: BUMP.get(),
        tuple: tuple(0),
        meta,
        base_seq: SeqNumber::new(1),
        session: secrets.session().as_u64(),
    };
    let chunk = Chunk {
        flow,
        incarnation,
        solo: true,
        ahead: 0,
        first: false,
        detached: false,
        withheld: false,
        epoch,
        offset,
        crc: checksum::crc32c(&plain),
        tcp: TcpFields {
            flags: packet::flags::ACK,
            window: 1,
            ack: SeqNumber::new(1),
            timestamps: None,
            meta: None,
            options: None,
            urgent: None,
        },
        open: Some(open),
    };
    let (receiver, mut cx) = peer.receiving(now, shared);
    assert!(receiver.take_chunk(
        &mut cx,
        PathIndex::new(0),
        &chunk,
        (&bytes, Protection::Authentic)
    ));
    pair.nodes[1].flush_injections();
}

#[test]
fn a_chunk_longer_than_a_packet_is_refused() {
    let mut pair = Pair::connected();
    // Without options an IPv4 packet has 65495 bytes of payload.
    for (len, refused) in [(65_495, 0), (65_496, 1), (66_000, 2)] {
        solo_chunk(&mut pair, frame::BASE_OFFSET, len);
        let counters = pair.nodes[1].counters();
        assert_eq!(counters.get(Counter::PeerContradiction), refused, "{len}");
    }
    assert_eq!(
        pair.nodes[1].poll_injection().unwrap().frame().len(),
        65_545
    );
    assert!(pair.nodes[1].poll_injection().is_none());
}

#[test]
fn a_stream_has_an_end() {
    let mut pair = Pair::connected();
    for (offset, refused) in [(u64::MAX - 11, 0), (u64::MAX - 10, 1), (u64::MAX, 2)] {
        solo_chunk(&mut pair, offset, 10);
        let counters = pair.nodes[1].counters();
        assert_eq!(counters.get(Counter::PeerContradiction), refused);
    }
}

#[test]
fn a_packet_ends_where_it_says() {
    let mut pair = Pair::connected();
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets(),
        IpAddr::V6(_) => unreachable!("inner addresses here are IPv4"),
    };
    let mut packet = vec![0; 100];
    packet[..10].copy_from_slice(&[0x45, 0, 0, 100, 0, 0, 0x20, 0, 64, packet::TCP]);
    packet[12..16].copy_from_slice(&octets(inner(0)));
    packet[16..20].copy_from_slice(&octets(inner(1)));
    let now = pair.now;
    let Node { shared, peers, .. } = &mut pair.nodes[1];
    // As much as fragments may add up to.
    for more in [0, 1, 67_000] {
        let long = [&packet[..], &vec![1; more]].concat();
        let (receiver, mut cx) = peers[0].receiving(now, shared);
        receiver.take_packet(&mut cx, BUMP.get(), &long, Protection::Encrypted);
        let injection = shared.injector.pop().expect("it is a packet");
        assert_eq!(injection.frame()[dibs_wire::virtio::LEN..], packet);
    }
    // An IPv6 packet may claim to be longer than any TUN takes.
    let mut long = vec![0; 40 + 65_535];
    long[..8].copy_from_slice(&[0x60, 0, 0, 0, 0xff, 0xff, 17, 64]);
    let (receiver, mut cx) = peers[0].receiving(now, shared);
    receiver.take_packet(&mut cx, BUMP.get(), &long, Protection::Encrypted);
    assert!(shared.injector.pop().is_none());
    assert_eq!(shared.journal.counters.get(Counter::FrameMalformed), 1);
}

#[test]
fn crumbs_are_refused() {
    let mut pair = Pair::connected();
    let now = pair.now;
    let Node { shared, peers, .. } = &mut pair.nodes[1];
    for at in 0..200 {
        let fragment = Frame::Fragment {
            id: 2,
            at: 2 * at,
            total: 60_000,
            header: 0,
            bytes: &[0],
        };
        let (receiver, mut cx) = peers[0].receiving(now, shared);
        assert!(receiver.take_inner(&mut cx, &fragment, Protection::Encrypted));
    }
    assert_eq!(
        shared.journal.counters.get(Counter::PeerContradiction),
        200 - 128
    );
}

/// What `share` promises of each byte: pieces that did not come by shares complete nothing that did, whichever
/// comes first, and take the place of none.
#[test]
fn pieces_with_another_cover_are_of_another_whole() {
    const SHARE: BumpId = crate::bump::SHARE;
    let split = Protection::Split(SHARE);
    for (first, last) in [
        (Protection::Encrypted, split),
        (split, Protection::Encrypted),
    ] {
        let mut pair = Pair::connected();
        let now = pair.now;
        let Node { shared, peers, .. } = &mut pair.nodes[1];
        // A fragment of a segment, in two pieces.
        let mut whole = [0; 101];
        whole[..11].copy_from_slice(&[
            SHARE.get(),
            0x45,
            0,
            0,
            100,
            0,
            0,
            0x20,
            0,
            64,
            packet::TCP,
        ]);
        whole[13..17].copy_from_slice(&[10, 0, 1, 1]);
        whole[17..21].copy_from_slice(&[10, 0, 1, 2]);
        let mut take = |shared: &mut Shared, at: usize, fill: u8, protection: Protection| {
            let mut bytes = whole[at..][..50 + at / 50].to_vec();
            bytes[40..].fill(fill);
            let fragment = Frame::Fragment {
                id: 2,
                at: at as u32,
                total: whole.len() as u32,
                header: 0,
                bytes: &bytes,
            };
            let (receiver, mut cx) = peers[0].receiving(now, shared);
            assert!(receiver.take_inner(&mut cx, &fragment, protection));
            shared.injector.pop()
        };
        assert!(take(shared, 0, 1, first).is_none());
        assert!(take(shared, 50, 2, last).is_none(), "they do not mix");
        // Those that came by shares are completed by shares.
        let (missing, other) = if first == split { (50, 0) } else { (0, 50) };
        let out = take(shared, missing, 3, split).expect("all came by shares");
        let (front, back) = if first == split { (1, 3) } else { (3, 2) };
        let bytes = &out.frame()[dibs_wire::virtio::LEN..];
        assert_eq!((bytes[48], bytes[99]), (front, back));
        // The others are no less whole, and not covered as the bump wants.
        assert_eq!(shared.journal.counters.get(Counter::CoverMissing), 0);
        assert!(take(shared, other, 4, Protection::Encrypted).is_none());
        assert_eq!(shared.journal.counters.get(Counter::CoverMissing), 1);
        assert_eq!(peers[0].receiver.in_pieces(), (0, 0, 0));
    }
}

#[test]
fn wholes_are_bounded_whatever_covers_them() {
    let mut pair = Pair::connected();
    let now = pair.now;
    let Node { shared, peers, .. } = &mut pair.nodes[1];
    for id in 0..200 {
        for protection in [Protection::Encrypted, Protection::Split(crate::bump::SHARE)] {
            let fragment = Frame::Fragment {
                id: 2 * id,
                at: 0,
                total: 60_000,
                header: 0,
                bytes: &[0],
            };
            let (receiver, mut cx) = peers[0].receiving(now, shared);
            assert!(receiver.take_inner(&mut cx, &fragment, protection));
        }
        let (_, bytes, _) = peers[0].receiver.in_pieces();
        assert!(bytes <= 4 << 20, "{bytes}");
    }
}
