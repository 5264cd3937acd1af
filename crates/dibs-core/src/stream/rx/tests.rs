use std::collections::BTreeMap;

use dibs_scramble::{BUFFER_LEN, Descrambler, Scrambler};
use dibs_wire::frame::BASE_OFFSET;
use proptest::prelude::*;

use super::front::MAX_PLAIN;
use super::held::{FREE_BLOCKS, FREE_LEN};
use super::*;

mod model;
mod order;

struct Keys;

impl Keys {
    fn epoch(epoch: u32) -> [u8; BUFFER_LEN] {
        [epoch as u8; BUFFER_LEN]
    }

    fn solo(epoch: u32, offset: u64) -> [u8; BUFFER_LEN] {
        [(u64::from(epoch) * 31).wrapping_add(offset) as u8; BUFFER_LEN]
    }
}

impl Decoders for Keys {
    fn epoch(&self, epoch: u32) -> Option<Box<dyn Decode>> {
        Some(Box::new(Descrambler::new(&Self::epoch(epoch))))
    }

    fn solo(&self, epoch: u32, offset: u64) -> Option<Box<dyn Decode>> {
        Some(Box::new(Descrambler::new(&Self::solo(epoch, offset))))
    }

    fn has_crc(&self) -> bool {
        true
    }
}

/// Keeps what was injected, by offset.
#[derive(Default)]
struct Kernel {
    room: Vec<u8>,
    at: u64,
    got: Vec<(u64, Vec<u8>)>,
}

impl Sink for Kernel {
    fn room(&mut self, offset: u64, _: &TcpFields<'_>, len: usize) -> &mut [u8] {
        self.at = offset;
        self.room = vec![0; len];
        &mut self.room
    }

    fn commit(&mut self) {
        self.got.push((self.at, std::mem::take(&mut self.room)));
    }

    fn retract(&mut self) {}
}

impl Kernel {
    /// All that was injected agrees with `plain`; returns which bytes are there.
    fn coverage(&self, plain: &[u8]) -> BTreeMap<usize, bool> {
        let mut have: BTreeMap<usize, bool> = (0..plain.len()).map(|i| (i, false)).collect();
        for (offset, bytes) in &self.got {
            let start = (offset - BASE_OFFSET) as usize;
            assert_eq!(*bytes, plain[start..start + bytes.len()], "at {start}");
            for i in start..start + bytes.len() {
                have.insert(i, true);
            }
        }
        have
    }
}

const fn tcp(flags: u16) -> TcpFields<'static> {
    TcpFields {
        flags,
        ..TcpFields::EMPTY
    }
}

#[derive(Clone, Debug)]
struct Sent {
    solo: bool,
    first: bool,
    epoch: u32,
    offset: u64,
    plain: Vec<u8>,
    bytes: Vec<u8>,
}

impl Sent {
    fn piece(&self) -> Piece<'_> {
        Piece {
            solo: self.solo,
            first: self.first,
            early: false,
            ahead: 0,
            withheld: false,
            epoch: self.epoch,
            offset: self.offset,
            crc: crc32c(&self.plain),
            tcp: const { &tcp(0) },
            bytes: &self.bytes,
        }
    }
}

/// Cuts `plain` into chained pieces of the given lengths.
fn chain(epoch: u32, start: u64, plain: &[u8], cuts: &[usize]) -> Vec<Sent> {
    let mut scrambler = Scrambler::new(&Keys::epoch(epoch));
    let mut at = 0;
    let mut out = Vec::new();
    for len in cuts.iter().cycle() {
        if at == plain.len() {
            break;
        }
        let part = &plain[at..plain.len().min(at + len)];
        let mut bytes = vec![0; part.len()];
        scrambler.scramble(part, &mut bytes);
        let offset = start + at as u64;
        out.push(Sent {
            solo: false,
            first: at == 0,
            epoch,
            offset,
            plain: part.into(),
            bytes,
        });
        at += part.len();
    }
    out
}

fn solo(epoch: u32, plain: &[u8], start: usize, len: usize) -> Sent {
    let end = plain.len().min(start + len);
    let offset = BASE_OFFSET + start as u64;
    let mut bytes = vec![0; end - start];
    Scrambler::new(&Keys::solo(epoch, offset)).scramble(&plain[start..end], &mut bytes);
    Sent {
        solo: true,
        first: false,
        epoch,
        offset,
        plain: plain[start..end].into(),
        bytes,
    }
}

fn plain(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

fn feed(
    stream: &mut RxStream,
    store: &mut Store,
    kernel: &mut Kernel,
    sent: &Sent,
) -> ChunkOutcome {
    stream.chunk(&sent.piece(), &Keys, store, kernel)
}

proptest! {
    /// Whatever the order and the repetitions, a chain is restored whole, once, in order.
    #[test]
    fn a_chain_is_restored_in_any_order(
        len in 1usize..3000,
        cuts in prop::collection::vec(1usize..300, 1..6),
        order in prop::collection::vec(any::<prop::sample::Index>(), 0..60),
    ) {
        let plain = plain(len);
        let mut pieces = chain(1, BASE_OFFSET, &plain, &cuts);
        let mut extra: Vec<Sent> =
            order.iter().map(|i| pieces[i.index(pieces.len())].clone()).collect();
        for i in order.iter().rev() {
            let at = i.index(pieces.len());
            let piece = pieces.remove(at);
            pieces.push(piece);
        }
        extra.extend(pieces);
        let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
        let mut kernel = Kernel::default();
        for sent in &extra {
            feed(&mut stream, &mut store, &mut kernel, sent);
        }
        let stream_bytes: Vec<u8> = kernel.got.iter().flat_map(|(_, b)| b.clone()).collect();
        prop_assert_eq!(stream_bytes, plain);
        prop_assert_eq!(store.held(), 0);
    }

    /// Lost pieces come as solo chunks of any cut, before or after what follows them; the chain
    /// closes over them and nothing wrong is ever injected.
    #[test]
    fn solo_chunks_close_gaps(
        len in 500usize..3000,
        cuts in prop::collection::vec(1usize..300, 1..6),
        lost in prop::collection::vec(any::<bool>(), 40),
        step in 1usize..400,
        early in any::<bool>(),
    ) {
        let plain = plain(len);
        let pieces = chain(1, BASE_OFFSET, &plain, &cuts);
        let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
        let mut kernel = Kernel::default();
        let gone = |i: usize| i > 0 && lost[i % lost.len()];
        let solos: Vec<Sent> = (0..len).step_by(step).map(|at| solo(1, &plain, at, step)).collect();
        let chained = pieces.iter().enumerate().filter(|(i, _)| !gone(*i)).map(|(_, p)| p);
        let mut all: Vec<&Sent> = chained.collect();
        if early {
            all.splice(1..1, &solos);
        } else {
            all.extend(&solos);
        }
        for sent in all {
            let outcome = feed(&mut stream, &mut store, &mut kernel, sent);
            prop_assert!(!matches!(outcome, ChunkOutcome::Corrupt | ChunkOutcome::Broken), "{:?}", outcome);
        }
        prop_assert!(kernel.coverage(&plain).values().all(|have| *have));
        prop_assert!(!stream.epochs.iter().any(|e| e.broken));
        prop_assert!(stream.epochs[0].held.is_empty());
    }

    /// A wrong byte anywhere is never injected, and ends the epoch.
    #[test]
    fn a_corrupt_chunk_is_never_injected(at in 0usize..1000, bit in 0u8..8) {
        let plain = plain(1000);
        let mut pieces = chain(1, BASE_OFFSET, &plain, &[100]);
        pieces[at / 100].bytes[at % 100] ^= 1 << bit;
        let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
        let mut kernel = Kernel::default();
        let outcomes: Vec<ChunkOutcome> =
            pieces.iter().map(|p| feed(&mut stream, &mut store, &mut kernel, p)).collect();
        prop_assert_eq!(outcomes[at / 100], ChunkOutcome::Corrupt);
        prop_assert!(outcomes[at / 100 + 1..].iter().all(|o| *o == ChunkOutcome::Broken));
        let have = kernel.coverage(&plain);
        prop_assert!(have.iter().all(|(i, have)| *have == (*i < at / 100 * 100)));
    }
}

#[test]
fn a_later_epoch_does_not_wait_for_an_earlier_one() {
    let plain = plain(2000);
    let old = chain(1, BASE_OFFSET, &plain[..1000], &[100]);
    let new = chain(2, BASE_OFFSET + 1000, &plain[1000..], &[100]);
    let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
    let mut kernel = Kernel::default();
    assert_eq!(
        feed(&mut stream, &mut store, &mut kernel, &old[0]),
        ChunkOutcome::Restored
    );
    assert_eq!(
        feed(&mut stream, &mut store, &mut kernel, &old[2]),
        ChunkOutcome::Held
    );
    for piece in &new {
        assert_eq!(
            feed(&mut stream, &mut store, &mut kernel, piece),
            ChunkOutcome::Restored
        );
    }
    assert_eq!(
        feed(&mut stream, &mut store, &mut kernel, &old[1]),
        ChunkOutcome::Restored
    );
    kernel.coverage(&plain);
    assert_eq!(store.held(), 0);
}

#[test]
fn a_gap_that_the_kernel_filled_otherwise_ends_the_epoch() {
    let plain = plain(1000);
    let pieces = chain(1, BASE_OFFSET, &plain, &[100]);
    let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
    let mut kernel = Kernel::default();
    feed(&mut stream, &mut store, &mut kernel, &pieces[0]);
    feed(&mut stream, &mut store, &mut kernel, &pieces[3]);
    assert_eq!(
        stream.local_ack(BASE_OFFSET + 100, &mut store, &mut kernel),
        None
    );
    assert_eq!(
        stream.local_ack(BASE_OFFSET + 150, &mut store, &mut kernel),
        Some(1)
    );
    assert_eq!(store.held(), 0);
    assert_eq!(
        feed(&mut stream, &mut store, &mut kernel, &pieces[1]),
        ChunkOutcome::Broken
    );
}

#[test]
fn what_solo_chunks_delivered_is_no_proof_of_a_gap() {
    let plain = plain(1000);
    let pieces = chain(1, BASE_OFFSET, &plain, &[100]);
    let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
    let mut kernel = Kernel::default();
    feed(&mut stream, &mut store, &mut kernel, &pieces[0]);
    feed(
        &mut stream,
        &mut store,
        &mut kernel,
        &solo(1, &plain, 100, 150),
    );
    assert_eq!(
        stream.local_ack(BASE_OFFSET + 250, &mut store, &mut kernel),
        None
    );
    feed(&mut stream, &mut store, &mut kernel, &pieces[2]);
    assert_eq!(kernel.got.last().unwrap().0, BASE_OFFSET + 200);
}

#[test]
fn the_store_is_bounded() {
    let plain = plain(10_000);
    let pieces = chain(1, BASE_OFFSET, &plain, &[100]);
    let (mut stream, mut store) = (RxStream::default(), Store::new(2000));
    let mut kernel = Kernel::default();
    let hold = |stream: &mut RxStream, store: &mut Store, kernel: &mut Kernel| {
        let outcomes = pieces[1..].iter().map(|p| feed(stream, store, kernel, p));
        outcomes.filter(|o| *o == ChunkOutcome::Held).count()
    };
    // Alone it gets two thirds; what is left is the others'.
    let held = hold(&mut stream, &mut store, &mut kernel);
    assert_eq!(held, 2000 * 2 / 3 / (100 + HELD_OVERHEAD));
    let mut other = RxStream::default();
    assert!(hold(&mut other, &mut store, &mut kernel) > 0);
    other.clear(&mut store);
    assert!(store.held() <= 2000);
    stream.clear(&mut store);
    assert_eq!(store.held(), 0);
}

/// The pieces of each of four epochs, one beyond the other with a gap between them, and of each gap a solo chunk
/// that is sent after the epoch behind it.
fn epochs_and_gaps(plain: &[u8]) -> Vec<(Vec<Sent>, Sent)> {
    let epoch = |number: u32| {
        let start = (number as usize - 1) * 1000;
        let at = BASE_OFFSET + start as u64;
        let pieces = chain(number, at, &plain[start..start + 900], &[100]);
        (pieces, solo(number + 1, plain, start + 900, 100))
    };
    (1..=4).map(epoch).collect()
}

#[test]
fn nothing_is_kept_for_chains_that_have_ended() {
    let plain = plain(5000);
    let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
    let mut kernel = Kernel::default();
    let sent = epochs_and_gaps(&plain);
    for (pieces, _) in &sent {
        for piece in pieces {
            feed(&mut stream, &mut store, &mut kernel, piece);
        }
    }
    for (_, gap) in &sent {
        feed(&mut stream, &mut store, &mut kernel, gap);
    }
    // The last is of an epoch that has not begun here.
    assert_eq!(store.held(), 0);
    let there = kernel.coverage(&plain[..4000]);
    assert!(there.values().all(|there| *there), "{there:?}");
}

#[test]
fn what_is_kept_for_a_chain_goes_when_it_ends() {
    let plain = plain(5000);
    let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
    let mut kernel = Kernel::default();
    let sent = epochs_and_gaps(&plain);
    let (first, second) = (&sent[0].0, &sent[1].0);
    // All but the second piece, and what TCP sends again of it and of the end, before the next epoch begins.
    for piece in first.iter().take(8).filter(|p| p.offset != first[1].offset) {
        feed(&mut stream, &mut store, &mut kernel, piece);
    }
    feed(
        &mut stream,
        &mut store,
        &mut kernel,
        &solo(1, &plain, 850, 50),
    );
    let held = store.held();
    feed(&mut stream, &mut store, &mut kernel, &second[0]);
    assert_eq!(store.held(), held - 50 - HELD_OVERHEAD);
    // What is held for a gap still gets what closes it.
    feed(
        &mut stream,
        &mut store,
        &mut kernel,
        &solo(2, &plain, 100, 100),
    );
    assert_eq!(store.held(), 0);
    let there = kernel.coverage(&plain);
    assert!((0..800).all(|at| there[&at]), "{there:?}");
}

#[test]
fn a_fin_takes_a_number() {
    let plain = plain(200);
    let mut pieces = chain(1, BASE_OFFSET, &plain, &[100]);
    let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
    let mut kernel = Kernel::default();
    let second = pieces.pop().unwrap();
    feed(&mut stream, &mut store, &mut kernel, &pieces[0]);
    let fin = Piece {
        tcp: &tcp(flags::FIN),
        ..second.piece()
    };
    assert_eq!(
        stream.chunk(&fin, &Keys, &mut store, &mut kernel),
        ChunkOutcome::Restored
    );
    assert_eq!(stream.epochs[0].front.next(), Some(BASE_OFFSET + 201));
    assert_eq!(
        stream.chunk(&fin, &Keys, &mut store, &mut kernel),
        ChunkOutcome::Duplicate
    );
}

#[test]
fn plain_bytes_that_no_chain_reaches_are_bounded() {
    let data = plain(6000);
    let (mut stream, mut store, mut kernel) =
        (RxStream::default(), Store::new(1 << 20), Kernel::default());
    let pieces = chain(1, BASE_OFFSET, &data, &[10]);
    feed(&mut stream, &mut store, &mut kernel, &pieces[0]);
    for at in 100..6000 {
        let sent = solo(1, &data, at, 1);
        assert_eq!(
            feed(&mut stream, &mut store, &mut kernel, &sent),
            ChunkOutcome::Restored,
            "the kernel gets it whatever we keep"
        );
    }
    assert_eq!(store.held(), MAX_PLAIN * (1 + HELD_OVERHEAD));
    stream.clear(&mut store);
    assert_eq!(store.held(), 0);
}

#[test]
fn memory_kept_for_later_pieces_is_bounded() {
    let mut store = Store::new(12 << 20);
    for len in [60_000, 1000] {
        let mut used = 0;
        let blocks: Vec<_> = std::iter::from_fn(|| store.take(&vec![0; len], &mut used)).collect();
        assert!(blocks.len() > 100);
        let blocks = blocks.into_iter();
        blocks.for_each(|block| store.give(block, &mut used));
    }
    assert_eq!(store.held(), 0);
    let kept: usize = store.free.iter().map(Vec::capacity).sum();
    assert!(kept > 0 && kept <= FREE_BLOCKS * FREE_LEN, "{kept}");
}

#[test]
fn a_chain_held_back_goes_on_with_a_repetition_that_need_not_be() {
    let plain = plain(500);
    let pieces = chain(1, BASE_OFFSET, &plain, &[100]);
    let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
    let mut kernel = Kernel::default();
    let early = Piece {
        early: true,
        ahead: 0,
        withheld: false,
        ..pieces[0].piece()
    };
    for outcome in [ChunkOutcome::Held, ChunkOutcome::Duplicate] {
        assert_eq!(
            stream.chunk(&early, &Keys, &mut store, &mut kernel),
            outcome
        );
    }
    assert_eq!(
        feed(&mut stream, &mut store, &mut kernel, &pieces[1]),
        ChunkOutcome::Held
    );
    assert_eq!(
        feed(&mut stream, &mut store, &mut kernel, &pieces[0]),
        ChunkOutcome::Duplicate
    );
    assert!(stream.held_start().is_none());
    for sent in &pieces[2..] {
        feed(&mut stream, &mut store, &mut kernel, sent);
    }
    let bytes: Vec<u8> = kernel.got.iter().flat_map(|(_, b)| b.clone()).collect();
    assert_eq!(bytes, plain);
    assert_eq!(store.held(), 0);
}

/// What a bump without a chain has.
struct Bare;

impl Decoders for Bare {
    fn epoch(&self, _: u32) -> Option<Box<dyn Decode>> {
        None
    }

    fn solo(&self, _: u32, _: u64) -> Option<Box<dyn Decode>> {
        None
    }

    fn has_crc(&self) -> bool {
        true
    }
}

/// `plain` in pieces without a chain.
fn bare(plain: &[u8], len: usize) -> Vec<Sent> {
    let part = |(at, part): (usize, &[u8])| Sent {
        solo: false,
        first: at == 0,
        epoch: 1,
        offset: BASE_OFFSET + (at * len) as u64,
        plain: part.into(),
        bytes: part.into(),
    };
    plain.chunks(len).enumerate().map(part).collect()
}

/// A stream without a chain, and its kernel.
struct Unchained {
    stream: RxStream,
    store: Store,
    kernel: Kernel,
}

impl Unchained {
    fn new() -> Self {
        Self {
            stream: RxStream::default(),
            store: Store::new(1 << 20),
            kernel: Kernel::default(),
        }
    }

    /// With these of the pieces.
    fn with<const N: usize>(pieces: &[Sent], at: [usize; N]) -> Self {
        let mut new = Self::new();
        for at in at {
            new.take(&pieces[at]);
        }
        new
    }

    fn take(&mut self, sent: &Sent) -> ChunkOutcome {
        let (store, kernel) = (&mut self.store, &mut self.kernel);
        self.stream.chunk(&sent.piece(), &Bare, store, kernel)
    }

    fn give_up(&mut self, seconds: u64) -> Option<u32> {
        let now = Time::ZERO + Duration::from_secs(seconds);
        let (store, kernel) = (&mut self.store, &mut self.kernel);
        self.stream
            .give_up_gaps(now, Duration::from_secs(60), store, kernel)
    }

    /// Where the kernel got something, in the order in which it did.
    fn got(&self) -> Vec<u64> {
        let got = self.kernel.got.iter();
        got.map(|(offset, _)| offset - BASE_OFFSET).collect()
    }
}

/// Where an epoch begins only its first piece says; without it all that followed was held (seed 956329).
#[test]
fn without_a_chain_what_tcp_sends_again_takes_the_place_of_a_lost_start() {
    let plain = plain(500);
    let pieces = bare(&plain, 100);
    let again = Sent {
        solo: true,
        first: false,
        ..pieces[0].clone()
    };
    for again_first in [true, false] {
        let mut s = Unchained::new();
        let order = match again_first {
            true => [&again, &pieces[1], &pieces[2]],
            false => [&pieces[1], &again, &pieces[2]],
        };
        for sent in order {
            s.take(sent);
        }
        assert_eq!(s.got(), [0, 100, 200]);
        assert_eq!(s.take(&pieces[4]), ChunkOutcome::Held, "order is kept");
        s.take(&pieces[3]);
        assert_eq!(s.got(), [0, 100, 200, 300, 400]);
        assert_eq!(s.store.held(), 0);
    }
}

/// TCP cuts otherwise than before: of what its resends passed over something may still come.
#[test]
fn a_start_that_was_passed_over_is_let_through() {
    let plain = plain(500);
    let pieces = bare(&plain, 100);
    let mut s = Unchained::new();
    s.take(&pieces[1]);
    let again = Sent {
        solo: true,
        offset: BASE_OFFSET + 50,
        plain: plain[50..150].into(),
        bytes: plain[50..150].into(),
        ..pieces[1].clone()
    };
    s.take(&again);
    assert_eq!(s.take(&pieces[0]), ChunkOutcome::Restored);
    assert_eq!(s.got(), [50, 100, 0]);
    assert_eq!(s.take(&pieces[1]), ChunkOutcome::Duplicate);
}

#[test]
fn an_old_gap_is_given_up_although_the_connection_is_not_silent() {
    let pieces = bare(&plain(1000), 100);
    let mut s = Unchained::with(&pieces, [0, 2, 3, 5]);
    s.give_up(30);
    s.take(&pieces[6]);
    assert_eq!(s.give_up(89), None);
    assert_eq!(s.got(), [0]);
    assert_eq!(s.give_up(90), None, "nothing ends without a chain");
    assert_eq!(s.got(), [0, 200, 300, 500, 600]);
    assert_eq!(s.take(&pieces[1]), ChunkOutcome::Restored);
    assert_eq!(s.take(&pieces[4]), ChunkOutcome::Restored);
    assert_eq!(s.take(&pieces[7]), ChunkOutcome::Restored);
    assert_eq!(s.got()[5..], [100, 400, 700]);
    assert_eq!(s.store.held(), 0);
}

#[test]
fn what_an_acknowledgement_passed_over_is_let_through() {
    let pieces = bare(&plain(500), 100);
    let mut s = Unchained::with(&pieces, [0, 2, 4]);
    // Of the first gap only; the second goes on with it.
    let acked = BASE_OFFSET + 150;
    let ended = s.stream.local_ack(acked, &mut s.store, &mut s.kernel);
    assert_eq!((ended, s.got()), (None, vec![0, 200, 400]));
    assert_eq!(s.take(&pieces[3]), ChunkOutcome::Restored);
    assert_eq!(s.got(), [0, 200, 400, 300]);
}

#[test]
fn a_gap_that_closed_in_time_is_another_one_than_the_next() {
    let data = plain(1000);
    let pieces = chain(1, BASE_OFFSET, &data, &[100]);
    let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
    let mut kernel = Kernel::default();
    let give_up = |stream: &mut RxStream, store: &mut Store, kernel: &mut Kernel, at| {
        let now = Time::ZERO + Duration::from_secs(at);
        stream.give_up_gaps(now, Duration::from_secs(60), store, kernel)
    };
    for at in [0, 2] {
        feed(&mut stream, &mut store, &mut kernel, &pieces[at]);
    }
    assert_eq!(give_up(&mut stream, &mut store, &mut kernel, 0), None);
    for at in [1, 4] {
        feed(&mut stream, &mut store, &mut kernel, &pieces[at]);
    }
    assert_eq!(give_up(&mut stream, &mut store, &mut kernel, 90), None);
    assert_eq!(give_up(&mut stream, &mut store, &mut kernel, 149), None);
    assert_eq!(give_up(&mut stream, &mut store, &mut kernel, 150), Some(1));
    assert_eq!((store.held(), store.take_abandoned()), (0, 1));
    let late = feed(&mut stream, &mut store, &mut kernel, &pieces[3]);
    assert_eq!(late, ChunkOutcome::Broken, "the sender is told again");
}

proptest! {
    /// Without a chain nothing that comes is kept from the kernel, in whatever order it comes and
    /// whatever was given up meanwhile.
    #[test]
    fn without_a_chain_all_that_comes_is_let_through(
        len in 1usize..60,
        order in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), any::<bool>()), 0..60),
    ) {
        let data = plain(1000);
        let mut pieces = bare(&data, len);
        let mut s = Unchained::new();
        let mut seconds = 0;
        for (i, alone, waits) in order {
            if !pieces.is_empty() {
                let piece = pieces.remove(i.index(pieces.len()));
                let outcome = s.take(&Sent { solo: alone, ..piece });
                prop_assert!(matches!(outcome, ChunkOutcome::Restored | ChunkOutcome::Held), "{:?}", outcome);
            }
            if waits {
                seconds += 60;
                prop_assert_eq!(s.give_up(seconds), None);
            }
        }
        for piece in &pieces {
            s.take(piece);
        }
        for _ in 0..2 {
            seconds += 60;
            s.give_up(seconds);
        }
        prop_assert!(s.kernel.coverage(&data).values().all(|have| *have));
        prop_assert!(!s.stream.is_waiting());
    }
}
