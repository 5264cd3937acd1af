//! A receiver that looks through all it has at each step, beside the one that keeps count; and what the
//! latter looks at.

use super::*;

/// What came to the kernel: offset and length.
type Got = Vec<(u64, u64)>;

#[derive(Default)]
struct NaiveEpoch {
    number: u32,
    next: Option<u64>,
    loose: u64,
    broken: bool,
    /// Spans of chained pieces that wait, and of solo chunks.
    held: Vec<(u64, u64)>,
    plain: Vec<(u64, u64)>,
}

impl NaiveEpoch {
    fn first(&self) -> Option<u64> {
        self.held.iter().map(|(at, _)| *at).min()
    }

    fn last(&self) -> Option<u64> {
        self.held.iter().map(|(at, _)| *at).max()
    }

    fn reach(&self) -> Option<u64> {
        let mut reach = self.next?;
        while let Some((_, end)) = self
            .plain
            .iter()
            .find(|(at, end)| *at <= reach && *end > reach)
        {
            reach = *end;
        }
        Some(reach)
    }

    fn pass(&mut self, offset: u64, end: u64, got: &mut Got) {
        got.push((offset, end - offset));
        self.next = self.next.max(Some(end));
    }

    fn drain(&mut self, got: &mut Got) {
        while let Some(first) = self.first()
            && self.reach().is_some_and(|reach| first <= reach)
        {
            let at = self.held.iter().position(|(at, _)| *at == first).unwrap();
            let (offset, end) = self.held.swap_remove(at);
            self.pass(offset, end, got);
        }
    }

    fn release(&mut self, got: &mut Got) {
        while let Some(first) = self.first() {
            (self.next, self.loose) = (Some(first), first);
            self.drain(got);
        }
    }
}

struct Naive {
    chained: bool,
    epochs: Vec<NaiveEpoch>,
    alone_to: u64,
    got: Got,
}

impl Naive {
    fn take(&mut self, sent: &Sent) -> ChunkOutcome {
        let (offset, end) = (sent.offset, sent.offset + sent.plain.len() as u64);
        match sent.solo {
            true => self.solo(sent.epoch, offset, end),
            false => self.piece(sent.epoch, sent.first, offset, end),
        }
    }

    fn solo(&mut self, number: u32, offset: u64, end: u64) -> ChunkOutcome {
        self.alone_to = self.alone_to.max(end);
        self.got.push((offset, end - offset));
        for epoch in self.epochs.iter_mut().filter(|e| !e.broken) {
            begin_behind(epoch, self.chained, self.alone_to);
            let wanted = epoch.number >= number || epoch.last().is_some_and(|last| offset < last);
            if wanted && epoch.next.is_some_and(|next| end > next) {
                epoch.plain.push((offset, end));
            }
        }
        for epoch in self.epochs.iter_mut().filter(|e| !e.broken) {
            epoch.drain(&mut self.got);
        }
        ChunkOutcome::Restored
    }

    fn piece(&mut self, number: u32, first: bool, offset: u64, end: u64) -> ChunkOutcome {
        if self.epochs.iter().all(|e| e.number != number) && !self.make_room(number) {
            return ChunkOutcome::Duplicate;
        }
        let epoch = self.epochs.iter_mut().find(|e| e.number == number).unwrap();
        let got = &mut self.got;
        if epoch.broken {
            return ChunkOutcome::Broken;
        }
        if end <= epoch.loose {
            got.push((offset, end - offset));
            return ChunkOutcome::Restored;
        }
        match epoch.next {
            None if first => epoch.next = Some(offset),
            Some(next) if first && next < offset => return ChunkOutcome::Contradiction,
            Some(next) if first && next > offset => return ChunkOutcome::Duplicate,
            _ => {}
        }
        match epoch.next {
            Some(next) if next == offset => {
                epoch.pass(offset, end, got);
                epoch.drain(got);
                ChunkOutcome::Restored
            }
            Some(next) if offset < next && end <= next => ChunkOutcome::Duplicate,
            Some(next) if offset < next => ChunkOutcome::Contradiction,
            _ => {
                let known = epoch.held.iter().any(|(at, _)| *at == offset);
                if !known {
                    epoch.held.push((offset, end));
                }
                begin_behind(epoch, self.chained, self.alone_to);
                if known {
                    return ChunkOutcome::Duplicate;
                }
                epoch.drain(got);
                ChunkOutcome::Held
            }
        }
    }

    /// Begins an epoch, in the place of the oldest if there are four.
    fn make_room(&mut self, number: u32) -> bool {
        if self.epochs.len() == EPOCHS {
            let oldest = self.epochs.iter().map(|e| e.number).min().unwrap();
            if number < oldest {
                return false;
            }
            let at = self.epochs.iter().position(|e| e.number == oldest).unwrap();
            let mut gone = self.epochs.remove(at);
            if !self.chained {
                gone.release(&mut self.got);
            }
        }
        for old in self.epochs.iter_mut().filter(|e| e.number < number) {
            let last = old.last();
            old.plain
                .retain(|(at, _)| last.is_some_and(|last| *at < last));
        }
        self.epochs.push(NaiveEpoch {
            number,
            ..NaiveEpoch::default()
        });
        true
    }

    fn local_ack(&mut self, acked: u64) -> Option<u32> {
        let passed = |e: &&mut NaiveEpoch| {
            let first = e.first();
            first.is_some_and(|first| acked > e.reach().unwrap_or(first))
        };
        let epoch = self.epochs.iter_mut().find(passed)?;
        if !self.chained {
            epoch.release(&mut self.got);
            return None;
        }
        epoch.broken = true;
        epoch.held.clear();
        epoch.plain.clear();
        Some(epoch.number)
    }

    fn give_up(&mut self) {
        for epoch in &mut self.epochs {
            epoch.broken |= !epoch.held.is_empty();
            epoch.held.clear();
            epoch.plain.clear();
        }
    }
}

fn begin_behind(epoch: &mut NaiveEpoch, chained: bool, alone_to: u64) {
    if !chained
        && epoch.next.is_none()
        && let Some(first) = epoch.first().filter(|first| *first <= alone_to)
    {
        (epoch.next, epoch.loose) = (Some(first), first);
    }
}

/// The decoders of a bump with a chain, or without.
enum Kind {
    Chained,
    Bare,
}

impl Decoders for Kind {
    fn epoch(&self, epoch: u32) -> Option<Box<dyn Decode>> {
        matches!(self, Self::Chained).then(|| Keys.epoch(epoch))?
    }

    fn solo(&self, epoch: u32, offset: u64) -> Option<Box<dyn Decode>> {
        matches!(self, Self::Chained).then(|| Keys.solo(epoch, offset))?
    }

    fn has_crc(&self) -> bool {
        true
    }
}

const LEN: usize = 500;

/// What may happen: all numbers are taken modulo what there is.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A piece of an epoch.
    Piece(usize, usize),
    /// The first of an epoch.
    First(usize),
    /// A solo chunk of an epoch, from here, so long.
    Solo(usize, usize, usize),
    Ack(usize),
    GiveUp,
}

fn step() -> impl Strategy<Value = Step> {
    let n = || 0..LEN;
    prop_oneof![
        8 => (n(), n()).prop_map(|(epoch, at)| Step::Piece(epoch, at)),
        2 => n().prop_map(Step::First),
        8 => (n(), n(), 1..60usize).prop_map(|(epoch, at, len)| Step::Solo(epoch, at, len)),
        1 => n().prop_map(Step::Ack),
        1 => Just(Step::GiveUp),
    ]
}

proptest! {
    /// Whatever comes in whatever order, and is told or given up meanwhile, is restored as by a receiver that
    /// keeps count of nothing.
    #[test]
    fn what_is_counted_is_what_is_there(
        chained in any::<bool>(),
        cuts in prop::collection::vec(1usize..30, 1..6),
        epochs in 1usize..7,
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let data = plain(LEN);
        let kind = if chained { Kind::Chained } else { Kind::Bare };
        let pieces: Vec<Vec<Sent>> = (0..epochs)
            .map(|at| {
                let start = at * 40;
                let number = at as u32 + 1;
                let mut pieces = chain(number, BASE_OFFSET + start as u64, &data[start..], &cuts);
                if !chained {
                    // A peer may cut what is no chain as it likes, also over what it sent before.
                    let more = pieces.iter_mut().filter(|p| p.offset % 3 == 0);
                    more.for_each(|p| {
                        let from = (p.offset - BASE_OFFSET) as usize;
                        p.plain = data[from..LEN.min(from + 45)].into();
                    });
                    pieces.iter_mut().for_each(|p| p.bytes.clone_from(&p.plain));
                }
                pieces
            })
            .collect();
        let (mut stream, mut store) = (RxStream::default(), Store::new(1 << 20));
        let mut kernel = Kernel::default();
        let mut naive = Naive { chained, epochs: Vec::new(), alone_to: 0, got: Vec::new() };
        for (count, step) in steps.iter().enumerate() {
            let sent = match *step {
                Step::Piece(epoch, at) => {
                    let pieces = &pieces[epoch % epochs];
                    pieces[at % pieces.len()].clone()
                }
                Step::First(epoch) => pieces[epoch % epochs][0].clone(),
                Step::Solo(epoch, at, len) => {
                    let number = (epoch % (epochs + 2)) as u32;
                    let mut sent = solo(number, &data, at, len);
                    if !chained {
                        sent.bytes.clone_from(&sent.plain);
                    }
                    sent
                }
                Step::Ack(at) => {
                    let acked = BASE_OFFSET + at as u64;
                    let ended = stream.local_ack(acked, &mut store, &mut kernel);
                    prop_assert_eq!(ended, naive.local_ack(acked), "step {}", count);
                    continue;
                }
                Step::GiveUp => {
                    stream.give_up(&mut store);
                    naive.give_up();
                    continue;
                }
            };
            let outcome = stream.chunk(&sent.piece(), &kind, &mut store, &mut kernel);
            prop_assert_eq!(outcome, naive.take(&sent), "step {}: {:?}", count, sent);
            let got: Got = kernel.got.iter().map(|(at, b)| (*at, b.len() as u64)).collect();
            prop_assert_eq!(&got, &naive.got, "step {}: {:?}", count, sent);
            for epoch in stream.epochs.iter().filter(|e| !e.broken) {
                let model = naive.epochs.iter().find(|e| e.number == epoch.number).unwrap();
                prop_assert_eq!(epoch.front.reach(), model.reach(), "step {}: {:?}", count, sent);
                prop_assert!(epoch.front.looks() <= 5 * (count + 1), "{}", epoch.front.looks());
            }
        }
        kernel.coverage(&data);
        stream.clear(&mut store);
        prop_assert_eq!(store.held(), 0);
    }
}

/// Four epochs wait for a gap behind which each holds a piece; the peer sends all before it in single bytes
/// that never close it, then the same over and over. None of them makes us walk through the others.
#[test]
fn a_tiny_chunk_costs_as_little_however_many_are_kept() {
    let data = plain(10_000);
    for kept in [64, 512, MAX_PLAIN] {
        let (mut stream, mut store) = (RxStream::default(), Store::new(32 << 20));
        let mut kernel = Kernel::default();
        for epoch in 1..=EPOCHS as u32 {
            let pieces = chain(epoch, BASE_OFFSET, &data, &[1, 8000]);
            // The first byte, and what lies 8000 behind it.
            for at in [0, 2] {
                feed(&mut stream, &mut store, &mut kernel, &pieces[at]);
            }
        }
        for _ in 0..3 {
            for at in 1..=kept {
                let tiny = solo(EPOCHS as u32, &data, at, 1);
                feed(&mut stream, &mut store, &mut kernel, &tiny);
                stream.local_ack(BASE_OFFSET + at as u64, &mut store, &mut kernel);
            }
        }
        for epoch in &stream.epochs {
            let known = BASE_OFFSET + 1 + kept as u64;
            assert_eq!((epoch.front.reach(), epoch.held.len()), (Some(known), 1));
            let looks = epoch.front.looks();
            assert!(
                looks <= 3 * kept,
                "{looks} at {kept} pieces that came three times"
            );
        }
    }
}
