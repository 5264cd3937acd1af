//! What is made of captures: datagrams of dibs among other packets.

use std::time::Duration;

use dibs_eavesdrop::{Attacker, How, Kind, Link, Report, Tap};
use dibs_scramble::{Scrambler, initial_buffer};

const ENGLISH: &[u8] = include_bytes!("texts/english.txt");
const CHUNK: usize = 700;
const PORT: u16 = 5300;

/// A UDP packet over IPv4 without a link's header.
fn packet(payload: &[u8]) -> Vec<u8> {
    let mut ip = [
        0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 2, 1, 10, 0, 2, 2,
    ];
    ip[2..4].copy_from_slice(&(28 + payload.len() as u16).to_be_bytes());
    let [high, low] = PORT.to_be_bytes();
    [&ip[..], &[high, low, high, low, 0, 0, 0, 0], payload].concat()
}

/// A stream of bytes without any pattern.
struct Noise(u64);

impl Noise {
    fn bytes(&mut self, length: usize) -> Vec<u8> {
        let next = || {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (self.0 >> 56) as u8
        };
        std::iter::repeat_with(next).take(length).collect()
    }
}

/// A datagram, whose header block and tag are random to who listens.
fn datagram(noise: &mut Noise, number: u64, payload: &[u8], header: usize) -> Vec<u8> {
    let mut bytes = vec![4, 1];
    bytes.extend(noise.bytes(2));
    bytes.extend([1, 2, 3, 4]);
    bytes.extend(number.to_be_bytes());
    bytes.extend(payload);
    bytes.extend(noise.bytes(header + 16));
    bytes
}

fn scrambled(text: &[u8]) -> Vec<u8> {
    let mut sent = vec![0; text.len()];
    Scrambler::new(&initial_buffer(&[0x5c; 20])).scramble(text, &mut sent);
    sent
}

fn report(frames: &[Vec<u8>], known: &[u8]) -> Report {
    let mut tap = Tap::new(PORT);
    for (at, frame) in (0..).zip(frames) {
        tap.frame(Duration::from_millis(at), Link::Ip, frame);
    }
    tap.report(&Attacker::new(), known)
}

/// Of five chunks the third goes by the trusted path; an acknowledgement lies between two of the others.
#[test]
fn chunks_are_read_one_behind_the_other_and_again_behind_a_gap() {
    let noise = &mut Noise(1);
    let sent = scrambled(ENGLISH);
    let chunk = |at: usize| &sent[65 + at * CHUNK..][..CHUNK];
    // The first frames of a flow open it, with 31 bytes more.
    let datagrams = [
        datagram(noise, 10, chunk(0), 71),
        datagram(noise, 11, &[], 30),
        datagram(noise, 12, chunk(1), 40),
        datagram(noise, 13, chunk(3), 40),
    ];
    let mut frames: Vec<Vec<u8>> = datagrams.iter().map(|bytes| packet(bytes)).collect();
    // As it is heard at both ends.
    frames.push(frames[0].clone());
    let report = report(&frames, b"");
    assert_eq!(report.directions.len(), 1);
    let way = &report.directions[0];
    assert_eq!((way.datagrams, way.missing, way.read), (4, 0, 3));
    assert_eq!(way.times.span, 0.003);
    let pieces: Vec<_> = way
        .pieces
        .iter()
        .map(|piece| (piece.first, piece.datagrams))
        .collect();
    assert_eq!(pieces, [(10, 2), (13, 1)]);
    let first = &way.pieces[0];
    assert_eq!((first.how, first.kind), (How::Within, Kind::English));
    // From 64 bytes before the first one on.
    assert_eq!(first.bytes, &ENGLISH[1..65 + 2 * CHUNK]);
    assert_eq!(
        way.pieces[1].bytes,
        &ENGLISH[65 + 3 * CHUNK - 64..65 + 4 * CHUNK]
    );
    assert!(first.text.contains("Nobody on the jetty was surprised"));
    assert_eq!(way.recovered, 3 * CHUNK as u64 + 128);
}

/// As where a server answers several clients.
#[test]
fn flows_that_take_turns_are_read_each_by_itself() {
    let noise = &mut Noise(4);
    let texts = [ENGLISH, &ENGLISH[1500..]];
    let sent = texts.map(scrambled);
    let frames: Vec<_> = (0..4)
        .map(|number| {
            let (flow, chunk) = (number as usize % 2, number as usize / 2);
            let payload = &sent[flow][65 + chunk * CHUNK..][..CHUNK];
            packet(&datagram(noise, number, payload, 40))
        })
        .collect();
    let report = report(&frames, b"");
    let pieces = &report.directions[0].pieces;
    for (flow, piece) in pieces.iter().enumerate() {
        assert_eq!((piece.first, piece.datagrams), (flow as u64, 2));
        assert_eq!(piece.bytes, &texts[flow][1..65 + 2 * CHUNK]);
    }
    assert_eq!(pieces.len(), 2);
}

/// Of each forty one is read, and goes on nowhere.
#[test]
fn no_more_datagrams_are_looked_at_than_take_a_bounded_time() {
    let noise = &mut Noise(5);
    let sent = scrambled(ENGLISH);
    let frames: Vec<_> = (0..400)
        .map(|number| {
            let payload = match number % 40 {
                0 => sent[65..][..CHUNK].to_vec(),
                _ => noise.bytes(1300),
            };
            packet(&datagram(noise, number, &payload, 40))
        })
        .collect();
    let report = report(&frames, b"");
    let way = &report.directions[0];
    assert_eq!((way.read, way.untried), (5, 200));
}

#[test]
fn nothing_is_read_of_what_is_sealed() {
    let noise = &mut Noise(2);
    let frames: Vec<_> = (0..60)
        .map(|number| {
            let payload = noise.bytes(if number < 50 { 60 } else { 1380 });
            packet(&datagram(noise, number, &payload, 40))
        })
        .collect();
    let report = report(&frames, ENGLISH);
    let way = &report.directions[0];
    assert_eq!((way.datagrams, way.read, way.recovered), (60, 0, 0));
    assert_eq!(way.untried, 20);
    assert!(way.statistics.entropy > 7.9, "{:?}", way.statistics);
    assert_eq!(way.lengths, [(132, 50), (1452, 10)]);
}

#[test]
fn a_known_file_is_recognised_and_unrolls_what_follows() {
    let noise = &mut Noise(3);
    let text = noise.bytes(4000);
    let sent = scrambled(&text);
    let frames = [packet(&datagram(noise, 0, &sent[500..1200], 40))];
    let way = &report(&frames, &text[300..800]).directions[0];
    assert_eq!((way.read, way.pieces[0].how), (1, How::Known));
    assert!(way.pieces[0].bytes.starts_with(&text[436..1100]));
}

#[test]
fn superpackets_bare_datagrams_and_plain_tcp_are_told_apart() {
    let noise = &mut Noise(4);
    let sent = scrambled(ENGLISH);
    let both = [
        datagram(noise, 0, &sent[100..800], 40),
        datagram(noise, 1, &sent[800..1500], 40),
    ];
    let mut bare = datagram(noise, 2, &sent[1500..2200], 40 - 16);
    (bare[0], bare[2], bare[3]) = (6, 0, 40);
    let mut tcp = packet(b"GET / HTTP/1.1\r\n");
    tcp[9] = 6;
    tcp.splice(28..28, [0, 0, 0, 0, 0x50, 0, 0, 0, 0, 0, 0, 0]);
    tcp[3] += 12;
    let mut handshake = vec![0; 1200];
    handshake[0] = 1;
    let frames = [
        packet(&both.concat()),
        packet(&bare),
        tcp,
        packet(&handshake),
        b"neither of these".to_vec(),
    ];
    let report = report(&frames, b"");
    assert_eq!(
        (report.packets, report.others, report.handshakes),
        (5, 1, 1)
    );
    assert_eq!(
        (report.plain.bytes, &report.plain.first[..5]),
        (16, &b"GET /"[..])
    );
    let way = &report.directions[0];
    assert_eq!((way.datagrams, way.read, way.pieces.len()), (3, 3, 1));
    assert_eq!(way.pieces[0].bytes, &ENGLISH[36..2200]);
}
