//! Decoders without a state, each with its encoder; and the scrambler's kernels beside the papers'
//! version.

use dibs_core::path::{AckFrame, MAX_ACK_RANGES};
use dibs_scramble::reference::Revised;
use dibs_scramble::{BUFFER_LEN, Descrambler, Kernel, Scrambler};
use dibs_switch::messages::Message;
use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Frame, Frames};

use crate::input::Input;
use crate::views;

/// The first byte chooses what is decoded.
pub fn messages(data: &[u8]) {
    let mut input = Input::new(data);
    match input.below(5) {
        0 => header_block(input.rest()),
        1 => acknowledgement(input.rest()),
        2 => daemons_message(input.rest()),
        3 => views::frame(&mut input),
        _ => scrambler(&mut input),
    }
}

/// Frames that were read and written again are read the same.
fn header_block(block: &[u8]) {
    // Of all frames an ack of nothing is the shortest behind a type alone.
    let mut written = vec![0; block.len()];
    let mut frames = Vec::new();
    let mut w = Writer::new(&mut written);
    for frame in Frames::new(block) {
        match frame {
            Ok(frame) => {
                check_len(&frame, &mut w);
                frames.push(frame);
            }
            Err(error) => {
                let _ = error.to_string();
            }
        }
    }
    let len = w.len();
    let again: Result<Vec<Frame<'_>>, _> = Frames::new(&written[..len]).collect();
    assert_eq!(again.as_ref(), Ok(&frames));
    for frame in &frames {
        if let Frame::Ack(body) = frame {
            acknowledgement(body);
        }
    }
}

/// Frames whose length is planned with have it.
fn check_len(frame: &Frame<'_>, w: &mut Writer<'_>) {
    let before = w.len();
    frame::encode(frame, w);
    let len = w.len() - before;
    let planned = match frame {
        Frame::Chunk(chunk) => frame::chunk_len(&chunk.tcp, chunk.solo, chunk.open.as_ref()),
        Frame::Segment(segment) => frame::segment_len(&segment.tcp, segment.open.as_ref()),
        Frame::Opaque { packet, .. } => frame::OPAQUE_OVERHEAD + packet.len(),
        Frame::Fragment { bytes, .. } => frame::FRAGMENT_OVERHEAD + bytes.len(),
        Frame::Control { bytes, .. } => frame::CONTROL_OVERHEAD + bytes.len(),
        Frame::Ack(bytes) => frame::ACK_OVERHEAD + bytes.len(),
        _ => len,
    };
    assert_eq!(len, planned);
}

fn acknowledgement(body: &[u8]) {
    let Ok(ack) = AckFrame::decode(body) else {
        return;
    };
    let ranges = ack.ranges();
    assert!((1..=MAX_ACK_RANGES).contains(&ranges.len()));
    assert!(ranges.iter().all(|r| r.start <= r.end));
    assert!(ranges.windows(2).all(|w| w[1].end + 1 < w[0].start));
    assert_eq!(ack.largest(), ranges[0].end);
    let mut coded = Vec::new();
    ack.encode(&mut coded);
    assert!(coded.len() <= body.len(), "ours is the shortest form");
    assert_eq!(AckFrame::decode(&coded).as_ref(), Ok(&ack));
    let again = AckFrame::new(ack.delay_us(), ranges);
    assert_eq!(
        again.map(|again| again.with_marked(ack.marked())),
        Some(ack)
    );
}

fn daemons_message(bytes: &[u8]) {
    if let Ok(message) = Message::decode(bytes) {
        assert_eq!(Message::decode(&message.encode()), Ok(message));
    }
}

/// Every kernel does in pieces what the papers' version does at once.
fn scrambler(input: &mut Input<'_>) {
    let mut initial = [0; BUFFER_LEN];
    initial[BUFFER_LEN - 20..].copy_from_slice(&input.array::<20>());
    let repeat = 1 + input.below(8);
    let cuts = input.array::<6>();
    let plain = input.rest().repeat(repeat);
    let mut expected = plain.clone();
    Revised::new(&initial).scramble(&mut expected);
    for kernel in Kernel::available() {
        let name = kernel.name();
        let mut scrambler = Scrambler::with_kernel(&initial, kernel);
        let mut descrambler = Descrambler::with_kernel(&initial, kernel);
        let (mut sent, mut restored) = (vec![0; plain.len()], vec![0; plain.len()]);
        let mut at = 0;
        for cut in cuts.iter().cycle() {
            let end = plain.len().min(at + usize::from(*cut) + 1);
            if cut % 2 == 0 {
                scrambler.scramble(&plain[at..end], &mut sent[at..end]);
                restored[at..end].copy_from_slice(&sent[at..end]);
                descrambler.descramble_in_place(&mut restored[at..end]);
            } else {
                sent[at..end].copy_from_slice(&plain[at..end]);
                scrambler.scramble_in_place(&mut sent[at..end]);
                if cut % 8 == 1 {
                    descrambler.advance(&plain[at..end]);
                    restored[at..end].copy_from_slice(&plain[at..end]);
                } else {
                    descrambler.descramble(&sent[at..end], &mut restored[at..end]);
                }
            }
            at = end;
            if at == plain.len() {
                break;
            }
        }
        assert!(sent == expected, "{name} scrambles as published");
        assert!(restored == plain, "{name} restores");
    }
}
