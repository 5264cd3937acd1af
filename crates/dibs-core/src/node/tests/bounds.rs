//! An authenticated peer that pushes every bound: what we hold stays bounded, every drop is counted,
//! and what is not the attacker's goes on.

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, EmptySegment, FlowId, Frame, Open, TcpFields};

use super::*;
use crate::node::flows::MAX_CONNS;
use crate::node::fq::MAX_QUEUED;
use crate::node::messages::{self, MAX_TAKEN, MAX_WAITING};
use crate::node::receive::MAX_HELD_STARTS;
use crate::slab::Key;

/// Room for frames in a datagram.
const ROOM: usize = 1300;

/// Host 0's daemon, which has the keys, sends these frames as one datagram.
fn forge(pair: &mut Pair, frames: &[u8]) {
    assert!(frames.len() <= ROOM, "it fits a datagram");
    pair.nodes[0].peers[0].paths[0]
        .frames
        .extend_from_slice(frames);
    pair.outputs();
}

/// As many datagrams as these frames need.
fn forge_all<'a>(pair: &mut Pair, frames: impl Iterator<Item = Frame<'a>>) {
    let mut block = Vec::new();
    for frame in frames {
        let mut bytes = [0; 512];
        let mut w = Writer::new(&mut bytes);
        frame::encode(&frame, &mut w);
        let len = w.len();
        if block.len() + len > ROOM {
            forge(pair, &block);
            block.clear();
        }
        block.extend_from_slice(&bytes[..len]);
    }
    forge(pair, &block);
}

fn segment(flow: u32, open: Option<Open>) -> Vec<u8> {
    let tcp = TcpFields {
        flags: flags::ACK,
        window: 1,
        ack: SeqNumber::new(1),
        timestamps: None,
        meta: None,
        options: None,
        urgent: None,
    };
    let mut bytes = vec![0; frame::segment_len(&tcp, open.as_ref())];
    let segment = EmptySegment {
        flow: FlowId::new(flow),
        incarnation: 0,
        seq: SeqNumber::new(1),
        tcp,
        open,
    };
    segment.encode(&mut Writer::new(&mut bytes));
    bytes
}

fn count(pair: &Pair, host: usize, counter: Counter) -> u64 {
    pair.nodes[host].counters().get(counter)
}

#[test]
fn flows_without_end_leave_room_for_connections_that_exist() {
    let mut pair = Pair::connected();
    let data = text(10_000);
    pair.send(0, 1, &data, 0, 1);
    pair.send_ack(1, 10_001);
    pair.run(Duration::from_millis(100));
    pair.assert_stream(1, &data);

    const BEYOND: usize = 3000;
    let session = pair.nodes[0].peers[0].association.newest_secrets();
    let session = session.session().as_u64();
    let mut block = Vec::new();
    for n in 0..MAX_CONNS + BEYOND {
        let open = Open {
            bump: BUMP.get(),
            tuple: FlowKey {
                sport: n as u16,
                dport: 1000 + (n >> 16) as u16,
                ..tuple(0)
            },
            meta: IpMeta::default(),
            base_seq: SeqNumber::new(1),
            session,
        };
        let bytes = segment(1_000_000 + n as u32, Some(open));
        if block.len() + bytes.len() > ROOM {
            forge(&mut pair, &block);
            block.clear();
            pair.run(Duration::from_millis(2));
            pair.injected[1].clear();
            pair.events[1].clear();
        }
        block.extend_from_slice(&bytes);
    }
    forge(&mut pair, &block);
    pair.run(Duration::from_millis(100));
    assert_eq!(pair.nodes[1].peers(pair.now)[0].conns, MAX_CONNS);
    assert_eq!(
        count(&pair, 1, Counter::FlowEvicted),
        BEYOND as u64 + 1,
        "one place was the true connection's"
    );
    // That one is still known: it goes on without being opened again.
    pair.injected[1].clear();
    let unknown = count(&pair, 1, Counter::FlowUnknown);
    pair.send(0, 10_001, &data, 0, 2);
    pair.run(Duration::from_millis(500));
    pair.assert_stream(1, &data);
    assert_eq!(count(&pair, 1, Counter::FlowUnknown), unknown);
}

#[test]
fn word_of_unknown_flows_is_bounded() {
    let mut pair = Pair::connected();
    for flow in 0..20 {
        let block: Vec<u8> = (0..40)
            .flat_map(|n| segment(5000 + flow * 40 + n, None))
            .collect();
        forge(&mut pair, &block);
    }
    pair.run(Duration::from_millis(50));
    let unknown = count(&pair, 1, Counter::FlowUnknown);
    let dropped = count(&pair, 1, Counter::NoticeDropped);
    assert_eq!(unknown, 800);
    assert!(dropped > 0 && dropped < unknown, "{dropped}");
    assert!(
        pair.injected[1].is_empty(),
        "nothing of it reaches a kernel"
    );
}

#[test]
fn messages_that_the_peer_does_not_take_are_refused_to_our_owner() {
    let mut pair = Pair::connected();
    let now = pair.now;
    let mut sent = 0;
    while pair.nodes[1].send_control(now, 0, b"answer", None).is_ok() {
        sent += 1;
        assert!(sent <= MAX_WAITING);
    }
    assert_eq!(
        pair.nodes[1].send_control(now, 0, b"answer", None),
        Err(ControlError::TooMany)
    );
    // Once it takes them there is room again, and none was lost.
    pair.run(Duration::from_secs(1));
    let took = pair.events[0]
        .iter()
        .filter(|e| matches!(e, Event::Control { .. }))
        .count();
    assert_eq!((took, sent), (MAX_WAITING, MAX_WAITING));
    let now = pair.now;
    assert!(pair.nodes[1].send_control(now, 0, b"answer", None).is_ok());
}

#[test]
fn of_messages_seen_before_only_the_latest_are_remembered() {
    let mut pair = Pair::connected();
    // No more at once than the owner has room for.
    for ids in (0..5000).step_by(200) {
        let controls = (ids..ids + 200).map(|id| Frame::Control { id, bytes: b"x" });
        forge_all(&mut pair, controls);
        pair.run(Duration::from_millis(100));
    }
    assert_eq!(pair.nodes[1].peers[0].queues.messages.counts()[0], 256);
    // A repetition of a late one does nothing.
    let events = pair.events[1].len();
    let again = (4990..5000).map(|id| Frame::Control { id, bytes: b"x" });
    forge_all(&mut pair, again);
    pair.run(Duration::from_millis(100));
    assert_eq!(pair.events[1].len(), events);
}

/// The messages that the owner of host 1 was given, by their first two bytes.
fn delivered(pair: &Pair) -> Vec<u16> {
    let number = |event: &Event| match event {
        Event::Control { bytes, .. } => Some(u16::from_be_bytes([bytes[0], bytes[1]])),
        _ => None,
    };
    pair.events[1].iter().filter_map(number).collect()
}

#[test]
fn messages_that_find_a_busy_owner_are_not_acknowledged_and_come_again() {
    let mut pair = Pair::connected();
    pair.busy[1] = true;
    let mut sent = 0;
    let mut offer = |pair: &mut Pair| {
        let now = pair.now;
        let next = |sent: u16| [sent.to_be_bytes(), [7; 2]].concat();
        while pair.nodes[0]
            .send_control(now, 0, &next(sent), None)
            .is_ok()
        {
            sent += 1;
        }
        pair.run(Duration::from_millis(500));
        sent
    };
    for _ in 0..10 {
        offer(&mut pair);
    }
    let sent = offer(&mut pair);
    let refused = count(&pair, 1, Counter::ControlRefused);
    assert_eq!(
        pair.nodes[1].peers[0].queues.messages.counts()[1],
        MAX_TAKEN
    );
    assert_eq!(
        usize::from(sent),
        MAX_TAKEN + MAX_WAITING + messages::WINDOW,
        "what is not taken waits at the sender"
    );
    assert_eq!(
        pair.nodes[0].peers[0].in_flight.messages(),
        messages::WINDOW
    );
    assert!(refused >= messages::WINDOW as u64, "{refused}");
    // Whatever else is between the two goes on.
    let data = text(100_000);
    pair.send(0, 1, &data[..50_000], 0, 1);
    pair.send(0, 50_001, &data[50_000..], 0, 1);
    pair.run(Duration::from_secs(1));
    pair.assert_stream(1, &data);
    pair.assert_open();

    pair.busy[1] = false;
    pair.run(Duration::from_secs(20));
    let mut got = delivered(&pair);
    got.sort_unstable();
    assert_eq!(got, (0..sent).collect::<Vec<_>>(), "each once");
    assert_eq!(pair.nodes[1].peers[0].queues.messages.counts()[1], 0);
    assert_eq!(pair.nodes[0].peers[0].in_flight.messages(), 0);
}

/// All paths are away for longer than whoever asks waits: what was on its way is not sent again, and what waited not at all.
#[test]
fn messages_that_nobody_waits_for_any_more_are_not_sent() {
    const PATIENCE: Duration = Duration::from_secs(2);
    let mut pair = Pair::connected();
    pair.filter = Box::new(|_, _, _| false);
    let late = messages::WINDOW as u16 + 4;
    for number in 0..=late {
        let patience = (number < late).then_some(PATIENCE);
        let sent = pair.nodes[0].send_control(pair.now, 0, &number.to_be_bytes(), patience);
        assert_eq!(sent, Ok(()));
    }
    pair.run(PATIENCE + Duration::from_secs(1));
    pair.filter = Box::new(|_, _, _| true);
    let patience = Some(PATIENCE);
    let sent = pair.nodes[0].send_control(pair.now, 0, &(late + 1).to_be_bytes(), patience);
    assert_eq!(sent, Ok(()));
    pair.run(PATIENCE);
    let mut got = delivered(&pair);
    got.sort_unstable();
    assert_eq!(got, [late, late + 1]);
    assert_eq!(pair.nodes[0].peers[0].in_flight.messages(), 0);
}

#[test]
fn a_flood_of_messages_makes_an_owner_hold_no_more_than_it_has_room_for() {
    let mut pair = Pair::connected();
    pair.busy[1] = true;
    let text = |id: u32| (id as u16).to_be_bytes();
    let flood = |pair: &mut Pair, ids: std::ops::Range<u32>| {
        for id in ids {
            let controls = [Frame::Control {
                id,
                bytes: &text(id),
            }];
            forge_all(pair, controls.into_iter());
        }
        pair.run(Duration::from_millis(100));
    };
    flood(&mut pair, 0..3000);
    let room = MAX_TAKEN as u32;
    assert_eq!(
        count(&pair, 1, Counter::ControlRefused),
        3000 - u64::from(room)
    );
    // Each that is done with makes room for one, which may be one that was refused.
    for _ in 0..10 {
        assert!(matches!(
            pair.nodes[1].poll_event(),
            Some(Event::Control { peer: 0, .. })
        ));
        pair.nodes[1].control_done(0);
    }
    flood(&mut pair, room..room + 20);
    assert_eq!(
        count(&pair, 1, Counter::ControlRefused),
        3000 - u64::from(room) + 10
    );
    pair.busy[1] = false;
    pair.outputs();
    assert_eq!(delivered(&pair), (10..room as u16 + 10).collect::<Vec<_>>());
}

#[test]
fn a_message_longer_than_any_is_not_taken_for_one() {
    let mut pair = Pair::connected();
    let before = count(&pair, 1, Counter::FrameMalformed);
    let long = [7; MAX_CONTROL + 1];
    let mut bytes = vec![0; frame::CONTROL_OVERHEAD + long.len()];
    let control = Frame::Control {
        id: 1,
        bytes: &long,
    };
    frame::encode(&control, &mut Writer::new(&mut bytes));
    forge(&mut pair, &bytes);
    pair.run(Duration::from_millis(100));
    assert_eq!(delivered(&pair), []);
    assert_eq!(count(&pair, 1, Counter::FrameMalformed), before + 1);
}

#[test]
fn pieces_of_wholes_that_never_come_are_bounded() {
    let mut pair = Pair::connected();
    let piece = |id, at| Frame::Fragment {
        id,
        at,
        total: 66 * 1024,
        header: 0,
        bytes: b"x",
    };
    // Many wholes of which one byte is there.
    forge_all(&mut pair, (0..500).map(|n| piece(2 * n, 0)));
    pair.run(Duration::from_millis(100));
    let (wholes, bytes, _) = pair.nodes[1].peers[0].receiver.in_pieces();
    assert!(wholes <= 64 && bytes <= 4 << 20, "{wholes}, {bytes}");
    assert!(count(&pair, 1, Counter::FragmentsExpired) >= 436);
    // One whole in single bytes.
    let before = count(&pair, 1, Counter::PeerContradiction);
    forge_all(&mut pair, (0..5000).map(|n| piece(7000, 2 * n)));
    pair.run(Duration::from_millis(100));
    let (_, _, parts) = pair.nodes[1].peers[0].receiver.in_pieces();
    assert!(parts <= 64 + 128, "{parts}");
    assert!(count(&pair, 1, Counter::PeerContradiction) > before + 4000);
    // And in the end all is forgotten.
    pair.run(Duration::from_secs(6));
    assert_eq!(pair.nodes[1].peers[0].receiver.in_pieces(), (0, 0, 0));
}

#[test]
fn pieces_of_many_chunks_wait_for_the_others() {
    let mut pair = Pair::connected();
    let piece = |number: u32, at| Frame::Fragment {
        id: 2 * number + 1,
        at,
        total: 2,
        header: 2,
        bytes: b"\xff",
    };
    let malformed = |pair: &Pair| count(pair, 1, Counter::FrameMalformed);
    // After a burst of losses the first pieces of hundreds may come before any of the second ones.
    forge_all(&mut pair, (0..1000).map(|n| piece(n, 0)));
    pair.run(Duration::from_millis(100));
    let before = malformed(&pair);
    forge_all(&mut pair, (0..1000).map(|n| piece(n, 1)));
    pair.run(Duration::from_millis(100));
    // All were put together; what they say is nothing.
    assert_eq!(malformed(&pair), before + 1000);
    assert_eq!(count(&pair, 1, Counter::FragmentsExpired), 0);
    // What there is no room for is not acknowledged, and nothing that was is dropped for it.
    forge_all(&mut pair, (0..2000).map(|n| piece(n, 0)));
    pair.run(Duration::from_millis(100));
    assert_eq!(pair.nodes[1].peers[0].receiver.in_pieces().0, 1024);
    assert_eq!(count(&pair, 1, Counter::FragmentsExpired), 0);
    assert!(count(&pair, 1, Counter::StoreFull) > 0);
}

#[test]
fn challenges_without_end_are_answered_within_bounds() {
    let mut pair = Pair::connected();
    const ASKED: u64 = 20_000;
    let before = pair.sent[1][0];
    let challenge = |n: u64| Frame::PathChallenge {
        challenge: n.to_be_bytes(),
    };
    forge_all(&mut pair, (0..ASKED).map(challenge));
    let sent: u64 = pair.sent[0][0];
    pair.run(Duration::from_millis(1));
    assert!(pair.nodes[1].peers[0].paths[0].frames.len() <= 512);
    assert!(pair.sent[1][0] - before < sent);
    pair.run(Duration::from_millis(100));
    // Host 0 asked nothing that it remembers.
    let answered = count(&pair, 0, Counter::PeerContradiction);
    let dropped = count(&pair, 1, Counter::PathFrameDropped);
    assert!(answered > 0 && dropped > 0, "{answered} and {dropped}");
    assert_eq!(answered + dropped, ASKED, "every drop is counted");
    pair.assert_open();
}

/// The local kernel of host 0 sends bytes of the connection from this port.
pub(super) fn speak(pair: &mut Pair, port: u16, seq: u32, payload: &[u8]) {
    speak_in_segments(pair, (port, seq), payload, 1400);
}

/// The same, cut into segments of `mss` bytes.
pub(super) fn speak_in_segments(
    pair: &mut Pair,
    (port, seq): (u16, u32),
    payload: &[u8],
    mss: u16,
) {
    let headers = Headers {
        tuple: FlowKey {
            sport: port,
            ..tuple(0)
        },
        meta: IpMeta {
            ttl: 64,
            ..IpMeta::default()
        },
        seq: SeqNumber::new(seq),
        ack: SeqNumber::new(5),
        flags: flags::ACK,
        window: WINDOW,
        urgent: 0,
        timestamps: None,
        options: None,
    };
    let node = &mut pair.nodes[0];
    let mut buffer = node.tun_buffer();
    let at = headers.encoded_len();
    let gso = match payload.len() > usize::from(mss) {
        true => mss,
        false => 0,
    };
    headers.write(&mut buffer[..MAX_HEADERS], payload.len(), gso);
    buffer[at..at + payload.len()].copy_from_slice(payload);
    node.handle_tun(pair.now, pair.bump, buffer, at + payload.len());
}

#[test]
fn a_peer_that_says_it_can_hold_nothing_makes_us_hold_little() {
    let mut pair = Pair::connected();
    let held = |pair: &mut Pair, ports: std::ops::Range<u16>, each: u32, len: usize| {
        let payload = text(len);
        pair.nodes[0].peers[0].association.set_store(0);
        let before = count(pair, 0, Counter::QueueFull);
        for port in ports {
            for n in 0..each {
                speak(pair, port, 1 + n * len as u32, &payload);
            }
        }
        pair.run(Duration::from_millis(100));
        let peer = &pair.nodes[0].peers[0];
        let full = count(pair, 0, Counter::QueueFull) - before;
        (peer.queues.fq.backlog(), peer.queues.fq.memory(), full)
    };
    speak(&mut pair, 1300, 1, &text(60_000));
    pair.run(Duration::from_millis(500));
    let (backlog, memory, full) = held(&mut pair, 1000..1200, 8, 60_000);
    assert!(memory <= MAX_QUEUED && memory > MAX_QUEUED / 2 && full > 0);
    // Who comes last and asks for little gets it, and what TCP sends again is taken.
    let (_, _, full) = held(&mut pair, 1200..1201, 4, 1000);
    assert_eq!(full, 0);
    let (_, _, full) = held(&mut pair, 1201..1202, 1, 60_000);
    assert_eq!(full, 1);
    let (_, _, full) = held(&mut pair, 1300..1301, 1, 60_000);
    assert_eq!(full, 0);
    // It takes them after all.
    pair.nodes[0].peers[0].association.set_store(32 << 20);
    pair.run(Duration::from_secs(1));
    assert!(pair.nodes[0].peers[0].queues.fq.backlog() < backlog / 2);

    // Short packets have buffers too.
    let mut pair = Pair::connected();
    let (backlog, memory, full) = held(&mut pair, 1000..1040, 1000, 1);
    assert!(memory <= MAX_QUEUED && memory > MAX_QUEUED / 2);
    assert_eq!(backlog as u64, 40 * 1000 - full);
    // None is lost count of.
    pair.nodes[0].peers[0].association.set_store(32 << 20);
    pair.run(Duration::from_secs(5));
    let peer = &pair.nodes[0].peers[0];
    assert_eq!((peer.queues.fq.backlog(), peer.queues.fq.memory()), (0, 0));
}

#[test]
fn only_so_many_chains_are_held_back_at_once() {
    let starts_at_once = |held: usize| {
        let mut pair = Pair::connected();
        let until = pair.now + Duration::from_millis(80);
        let others = (0..held as u64).map(|n| (Key::from_u64(n | 7 << 32), until));
        pair.nodes[1].peers[0].receiver.held_starts.extend(others);
        // What lies before is still on its way in plain, as far as is known.
        pair.send_ack(1, 1000);
        let data = text(5000);
        pair.send(0, 2000, &data, 0, 2);
        pair.run(Duration::from_millis(40));
        let at_once = !pair.injected[1].is_empty();
        pair.run(Duration::from_millis(200));
        pair.assert_stream(1, &data);
        assert!(pair.nodes[1].peers[0].receiver.held_starts.is_empty());
        at_once
    };
    assert!(!starts_at_once(MAX_HELD_STARTS - 1));
    assert!(starts_at_once(MAX_HELD_STARTS));
}
