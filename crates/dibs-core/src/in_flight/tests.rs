//! What waits, comes and goes.

use dibs_wire::frame::{FlowId, TcpFields};

use super::*;
use crate::chunk::ChainId;
use crate::tcp_fields::OwnedFields;

fn control(id: u32) -> Message {
    let bytes = Box::from(*b"x");
    Message {
        id,
        bytes,
        until: None,
    }
}

fn chunk(batch: Key, len: u16) -> Chunk {
    Chunk {
        offset: 0,
        batch,
        at: 0,
        crc: 0,
        len,
        segment: 0,
        flags: 0,
        solo: false,
        ahead: 0,
        first: false,
        detached: false,
        withheld: false,
    }
}

#[test]
fn what_waits_fits_a_cache_line() {
    assert!(size_of::<Sent>() <= 56, "{}", size_of::<Sent>());
}

#[test]
fn who_shares_a_batch_has_nothing_left_when_its_own_chunk_went() {
    let mut pool = Pool::new(1);
    let mut waiting = InFlight::default();
    let batch = waiting.add_batch(pool.take());
    let mut add = |conn| {
        let chain = ChainId {
            flow: FlowId::new(1),
            incarnation: 1,
            epoch: 1,
        };
        let tcp = OwnedFields::new(&TcpFields::EMPTY);
        let segment = waiting.add_segment(batch, SegmentMeta { conn, chain, tcp });
        let chunk = Chunk {
            segment,
            ..chunk(batch, 10)
        };
        waiting.add(Content::Chunk(chunk), Placement::Any)
    };
    let [one, other] = [1, 2].map(Key::from_u64);
    let [first, _] = [one, other].map(&mut add);
    assert!(waiting.has(one) && waiting.has(other));
    waiting.remove(first, &mut pool);
    assert!(!waiting.has(one), "only the other's bytes wait");
    assert!(waiting.has(other));
}

#[test]
fn a_batch_with_little_in_it_goes_to_a_smaller_buffer() {
    let mut pool = Pool::new(1);
    let mut waiting = InFlight::default();
    let batch = waiting.add_batch(pool.take());
    waiting.batch_mut(batch)[..5000].fill(7);
    waiting.add(Content::Chunk(chunk(batch, 5000)), Placement::Any);
    waiting.shrink_batch(batch, 5000, &mut pool);
    assert_eq!(waiting.held(), Pool::len_for(5000));
    assert_eq!(waiting.batch(batch)[..5000], [7; 5000]);
    let held = waiting.held();
    waiting.shrink_batch(batch, 5000, &mut pool);
    assert_eq!(waiting.held(), held, "there is no smaller one");
}

#[test]
fn the_span_counts_from_the_oldest_unacknowledged() {
    let mut pool = Pool::new(1);
    let mut waiting = InFlight::default();
    let first = waiting.add_message(control(0));
    let batch = {
        let buffer = pool.take();
        waiting.add_batch(buffer)
    };
    let chunk = |len| Content::Chunk(chunk(batch, len));
    let a = waiting.add(chunk(100), Placement::Any);
    let b = waiting.add(chunk(50), Placement::Any);
    assert_eq!(waiting.span(), 150);
    waiting.remove(a, &mut pool);
    assert_eq!(waiting.span(), 150, "the first is still out");
    waiting.remove(first, &mut pool);
    assert_eq!(waiting.span(), 50);
    assert!(waiting.held() > 0);
    waiting.remove(b, &mut pool);
    assert_eq!((waiting.span(), waiting.held(), waiting.len()), (0, 0, 0));
    assert_eq!(waiting.claim(), 0);

    // What is acknowledged behind something that is not takes room as well.
    let first = waiting.add_message(control(1));
    for _ in 0..1000 {
        let later = waiting.add_message(control(2));
        waiting.remove(later, &mut pool);
    }
    assert!(waiting.claim() >= 1000 * HELD_OVERHEAD);
    waiting.remove(first, &mut pool);
    assert_eq!(waiting.claim(), 0);
}

#[test]
fn what_is_postponed_holds_up_nothing_and_keeps_its_bytes() {
    let mut pool = Pool::new(1);
    let mut waiting = InFlight::default();
    let batch = waiting.add_batch(pool.take());
    let keys = [100, 200, 300].map(|len| {
        let chunk = Content::Chunk(chunk(batch, len));
        waiting.add(chunk, Placement::Any)
    });
    waiting.remove(keys[1], &mut pool);
    assert_eq!(waiting.oldest().map(|(key, _)| key), Some(keys[0]));
    assert_eq!(waiting.span(), 600, "the first one holds up all");
    let first = waiting.postpone(keys[0]);
    assert_eq!(waiting.oldest().map(|(key, _)| key), Some(keys[2]));
    assert_eq!((waiting.span(), waiting.len()), (400, 2));
    assert!(waiting.get(keys[0]).is_none());
    let len = waiting.get(first).map(|p| p.content.payload_len());
    assert_eq!(len, Some(100));
    waiting.remove(keys[2], &mut pool);
    assert!(waiting.has_batch(batch));
    waiting.remove(first, &mut pool);
    assert!(waiting.is_empty() && !waiting.has_batch(batch));
    assert_eq!(waiting.claim(), 0);
}
