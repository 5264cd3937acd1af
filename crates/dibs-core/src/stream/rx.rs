//! The receiver's side of a stream.

use std::time::Duration;

use dibs_wire::checksum::crc32c;
use dibs_wire::frame::TcpFields;
use dibs_wire::packet::flags;
use smallvec::SmallVec;

use crate::bump::Decode;
use crate::tcp_fields::OwnedFields;
use crate::time::Time;

mod front;
mod held;
mod overtaking;

use front::Front;
pub use held::{HELD_OVERHEAD, STORE_LIMIT, Store};
use held::{Held, Holding};
use overtaking::{Awaited, Overtaking};

/// Epochs of one stream that are restored side by side; what belongs to an older one has been sent
/// again by TCP long since.
const EPOCHS: usize = 4;

/// A chunk as the stream sees it.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Restored on its own.
    pub solo: bool,
    /// On its own: how far its epoch had come when it was sent, in bytes beyond the offset.
    pub ahead: u32,
    /// First of its epoch.
    pub first: bool,
    /// To be held back, with its whole epoch, until [`RxStream::release_start`]: what lies in front of it
    /// is still on its way elsewhere, and the kernel would take it for lost.
    pub early: bool,
    /// Part of its epoch, and not to be injected.
    pub withheld: bool,
    /// Its epoch.
    pub epoch: u32,
    /// Stream offset.
    pub offset: u64,
    /// CRC-32C of the plaintext, where it counts.
    pub crc: u32,
    /// TCP header fields.
    pub tcp: &'a TcpFields<'a>,
    /// The bytes as they were sent.
    pub bytes: &'a [u8],
}

impl Piece<'_> {
    fn end(&self) -> u64 {
        end(self.offset, self.bytes.len(), self.tcp.flags)
    }
}

/// A FIN occupies one number behind the bytes.
fn end(offset: u64, len: usize, tcp_flags: u16) -> u64 {
    offset.saturating_add(len as u64 + u64::from(tcp_flags & flags::FIN != 0))
}

/// Outcome of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkOutcome {
    /// Injected.
    Restored,
    /// Kept until what lies in front of it arrives.
    Held,
    /// Seen before.
    Duplicate,
    /// No room to hold it: it counts as not received.
    NoRoom,
    /// Its epoch has ended and cannot be restored; the sender must be told.
    Broken,
    /// It did not restore to what its CRC says: its epoch ends here; the sender must be told.
    Corrupt,
    /// It contradicts what the same peer sent before.
    Contradiction,
}

/// Takes restored bytes, in any order of offsets.
pub trait Sink {
    /// Room for `len` bytes at `offset`; they count only after [`commit`](Self::commit).
    fn room(&mut self, offset: u64, tcp: &TcpFields<'_>, len: usize) -> &mut [u8];
    /// The bytes written to the last room are valid.
    fn commit(&mut self);
    /// They are not, and must vanish.
    fn retract(&mut self);
}

/// How the bytes of one incarnation are restored.
pub trait Decoders {
    /// The chain's decoder; none where the bytes are as they were.
    fn epoch(&self, epoch: u32) -> Option<Box<dyn Decode>>;
    /// The decoder of a solo chunk.
    fn solo(&self, epoch: u32, offset: u64) -> Option<Box<dyn Decode>>;
    /// Whether a CRC says that bytes are right; otherwise their encryption did.
    fn has_crc(&self) -> bool;
}

/// Restores bytes; false if the CRC disagrees.
fn restore(
    decoder: Option<&mut (dyn Decode + 'static)>,
    bytes: &[u8],
    crc: Option<u32>,
    room: &mut [u8],
) -> bool {
    match (decoder, crc) {
        (Some(decoder), Some(crc)) => return decoder.decode_summed(bytes, room) == crc,
        (Some(decoder), None) => decoder.decode(bytes, room),
        (None, _) => room.copy_from_slice(bytes),
    }
    crc.is_none_or(|crc| crc32c(room) == crc)
}

#[derive(Debug)]
struct Epoch {
    number: u32,
    /// Where it stands, and what came by solo chunks beyond.
    front: Front,
    /// Where the chain begins, while its start is held back.
    held_start: Option<u64>,
    /// None where the bytes are as they were: then nothing hangs on what is missing.
    decoder: Option<Box<dyn Decode>>,
    has_crc: bool,
    /// Ended before its time; what still comes is of no use.
    broken: bool,
    /// In front of it gaps were given up: what was missing there goes on as it comes.
    loose: u64,
    /// What it has of the store.
    used: usize,
    /// Chained pieces beyond where it stands.
    held: Holding,
}

/// Restores the stream of one incarnation.
///
/// Chained chunks are injected in the order of their epoch; solo chunks whatever the kernel has, for it alone knows
/// that, at once unless they [overtook](Overtaking) others. Their plaintext also closes gaps of the chain.
#[derive(Debug, Default)]
pub struct RxStream {
    epochs: SmallVec<[Epoch; 1]>,
    /// How far solo chunks reached.
    alone_to: u64,
    overtaking: Overtaking,
}

impl RxStream {
    /// Takes a chunk.
    pub fn chunk(
        &mut self,
        piece: &Piece<'_>,
        decoders: &impl Decoders,
        store: &mut Store,
        sink: &mut impl Sink,
    ) -> ChunkOutcome {
        let outcome = match piece.solo {
            true => self.solo(piece, decoders, store, sink),
            false => self.chained(piece, decoders, store, sink),
        };
        self.overtaking.inject(&self.epochs, store, sink);
        outcome
    }

    fn solo(
        &mut self,
        piece: &Piece<'_>,
        decoders: &impl Decoders,
        store: &mut Store,
        sink: &mut impl Sink,
    ) -> ChunkOutcome {
        let mut decoder = decoders.solo(piece.epoch, piece.offset);
        let crc = decoders.has_crc().then_some(piece.crc);
        let awaited = Awaited {
            epoch: piece.epoch,
            upto: piece.offset.saturating_add(piece.ahead.into()),
        };
        if self.has_overtaken(piece, awaited)
            && let Some(room) = self.overtaking.room(piece, store)
        {
            if !restore(decoder.as_deref_mut(), piece.bytes, crc, room) {
                self.overtaking.retract(store);
                return ChunkOutcome::Contradiction;
            }
            self.overtaking.wait_for(awaited);
            return ChunkOutcome::Held;
        }
        let room = sink.room(piece.offset, piece.tcp, piece.bytes.len());
        if !restore(decoder.as_deref_mut(), piece.bytes, crc, room) {
            sink.retract();
            // A solo chunk says nothing about its epoch's chain.
            return ChunkOutcome::Contradiction;
        }
        self.alone_to = self.alone_to.max(piece.end());
        for epoch in self.epochs.iter_mut().filter(|e| !e.broken) {
            epoch.begin_behind(self.alone_to);
            if epoch.number >= piece.epoch || epoch.waits_beyond(piece.offset) {
                let span = (piece.offset, piece.end());
                epoch.front.keep(span, room, store, &mut epoch.used);
            }
        }
        sink.commit();
        for epoch in self.epochs.iter_mut().filter(|e| !e.broken) {
            epoch.drain(store, sink);
        }
        ChunkOutcome::Restored
    }

    /// Whether a solo chunk came before what was sent before it: it stands in front of all that its epoch still awaits,
    /// which had come further already.
    fn has_overtaken(&self, solo: &Piece<'_>, awaited: Awaited) -> bool {
        let mut epochs = self.epochs.iter().filter(|e| e.number == solo.epoch);
        let behind = |e: &Epoch| e.front.next().is_some_and(|next| solo.end() <= next);
        epochs.any(behind) && solo.tcp.flags & flags::RST == 0 && awaited.is_open(&self.epochs)
    }

    fn chained(
        &mut self,
        piece: &Piece<'_>,
        decoders: &impl Decoders,
        store: &mut Store,
        sink: &mut impl Sink,
    ) -> ChunkOutcome {
        let alone_to = self.alone_to;
        let Some(epoch) = self.epoch(piece.epoch, decoders, store, sink) else {
            return ChunkOutcome::Duplicate;
        };
        if epoch.broken {
            return ChunkOutcome::Broken;
        }
        if piece.end() <= epoch.loose {
            if epoch.inject(piece, sink) {
                return ChunkOutcome::Restored;
            }
            epoch.end(store);
            return ChunkOutcome::Corrupt;
        }
        if piece.first {
            match epoch.front.next() {
                None if piece.early => {
                    let outcome = epoch.hold(piece, store);
                    if outcome == ChunkOutcome::Held {
                        epoch.held_start = Some(piece.offset);
                    }
                    return outcome;
                }
                // It came before, and is held: with what followed it.
                None if epoch.held_start.is_some() => {
                    epoch.pass_start();
                    return match epoch.drain(store, sink) {
                        true => ChunkOutcome::Duplicate,
                        false => ChunkOutcome::Corrupt,
                    };
                }
                None => epoch.front.move_to(piece.offset),
                // So far it brought no byte: a reset, perhaps sent twice.
                Some(next) if next == piece.offset => {}
                Some(next) if next < piece.offset => return ChunkOutcome::Contradiction,
                Some(_) => return ChunkOutcome::Duplicate,
            }
        }
        match epoch.front.next() {
            Some(next) if next == piece.offset => {
                if !epoch.restore(piece, sink) {
                    epoch.end(store);
                    return ChunkOutcome::Corrupt;
                }
                if epoch.drain(store, sink) {
                    ChunkOutcome::Restored
                } else {
                    ChunkOutcome::Corrupt
                }
            }
            Some(next) if piece.offset < next => {
                if piece.end() <= next {
                    ChunkOutcome::Duplicate
                } else {
                    ChunkOutcome::Contradiction
                }
            }
            _ => {
                let outcome = epoch.hold(piece, store);
                epoch.begin_behind(alone_to);
                // Plain bytes of a solo chunk may already reach up to this piece.
                if outcome == ChunkOutcome::Held && !epoch.drain(store, sink) {
                    return ChunkOutcome::Corrupt;
                }
                outcome
            }
        }
    }

    /// The local kernel has acknowledged everything up to `offset`. Returns an epoch that this
    /// proves unrestorable: the gap in front of its held pieces was filled past us. Without a chain
    /// they go on.
    pub fn local_ack(
        &mut self,
        offset: u64,
        store: &mut Store,
        sink: &mut impl Sink,
    ) -> Option<u32> {
        let epoch = self.epochs.iter_mut().find(|e| e.is_passed_by(offset))?;
        let number = epoch.number;
        let ends = epoch.decoder.is_some() || !epoch.release(store, sink);
        if ends {
            epoch.end(store);
        }
        self.overtaking.inject(&self.epochs, store, sink);
        ends.then_some(number)
    }

    /// Gives up gaps at which nothing has moved for `patience`, as often as this is asked: what they
    /// lack was lost although the sender has word of it. Without a chain what waits there goes on.
    /// Returns an epoch that it ends; there may be more.
    pub fn give_up_gaps(
        &mut self,
        now: Time,
        patience: Duration,
        store: &mut Store,
        sink: &mut impl Sink,
    ) -> Option<u32> {
        let mut ended = None;
        for epoch in &mut self.epochs {
            let since = epoch.held.waits_since(now, epoch.front.next());
            if since.is_none_or(|since| now.since(since) < patience) {
                continue;
            }
            if epoch.decoder.is_some() {
                epoch.abandon(store);
            } else if epoch.release(store, sink) {
                continue;
            }
            ended = Some(epoch.number);
            break;
        }
        self.overtaking.inject(&self.epochs, store, sink);
        ended
    }

    /// Ends the epochs that wait for a gap to close, and keeps nothing for later ones: it has been
    /// too long.
    pub fn give_up(&mut self, store: &mut Store) {
        self.overtaking.forget_all(store);
        for epoch in &mut self.epochs {
            if epoch.held.is_empty() {
                epoch.front.forget_all(store, &mut epoch.used);
            } else {
                epoch.abandon(store);
            }
        }
    }

    /// Start of an epoch that is held back.
    pub fn held_start(&self) -> Option<u64> {
        self.epochs.iter().find_map(|e| e.held_start)
    }

    /// True if something is held back until [`release_start`](Self::release_start): the start of an epoch, or solo
    /// chunks that overtook others.
    pub fn holds_back(&self) -> bool {
        self.held_start().is_some() || !self.overtaking.is_empty()
    }

    /// Lets what was held back go on; returns an epoch that turned out corrupt.
    pub fn release_start(&mut self, store: &mut Store, sink: &mut impl Sink) -> Option<u32> {
        self.overtaking.inject_all(store, sink);
        let epoch = self.epochs.iter_mut().find(|e| e.held_start.is_some())?;
        epoch.pass_start();
        (!epoch.drain(store, sink)).then_some(epoch.number)
    }

    /// True if something waits for a gap to close.
    pub fn is_waiting(&self) -> bool {
        self.epochs.iter().any(|e| !e.held.is_empty())
    }

    /// Gives back the memory that only a stream under way needs.
    pub fn shrink(&mut self) {
        self.overtaking.shrink();
        for epoch in &mut self.epochs {
            epoch.held.shrink();
            epoch.front.shrink();
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self, store: &mut Store) {
        for epoch in &mut self.epochs {
            epoch.end(store);
        }
        self.epochs.clear();
        self.overtaking.forget_all(store);
    }

    fn epoch(
        &mut self,
        number: u32,
        decoders: &impl Decoders,
        store: &mut Store,
        sink: &mut impl Sink,
    ) -> Option<&mut Epoch> {
        if let Some(at) = self.epochs.iter().position(|e| e.number == number) {
            return Some(&mut self.epochs[at]);
        }
        let oldest = self.epochs.iter().map(|e| e.number).min();
        if self.epochs.len() == EPOCHS {
            let oldest = oldest.expect("the list is full");
            if number < oldest {
                return None;
            }
            self.epochs.retain_mut(|e| {
                if e.number == oldest {
                    if e.held_start.is_some() {
                        // Whole, but for what went another way: better early than not at all.
                        e.pass_start();
                        e.drain(store, sink);
                    }
                    if e.decoder.is_none() {
                        e.release(store, sink);
                    }
                    e.abandon(store);
                }
                e.number != oldest
            });
        }
        for old in self.epochs.iter_mut().filter(|e| e.number < number) {
            old.forget_beyond_held(store);
        }
        self.epochs.push(Epoch {
            number,
            front: Front::default(),
            held_start: None,
            decoder: decoders.epoch(number),
            has_crc: decoders.has_crc(),
            broken: false,
            loose: 0,
            used: 0,
            held: Holding::default(),
        });
        self.epochs.last_mut()
    }
}

impl Epoch {
    /// Restores a piece that the chain has come to, and injects it; false if the CRC disagrees.
    fn restore(&mut self, piece: &Piece<'_>, sink: &mut impl Sink) -> bool {
        if !self.inject(piece, sink) {
            return false;
        }
        self.front.move_to(piece.end());
        true
    }

    /// Injects a piece; false if the CRC disagrees.
    fn inject(&mut self, piece: &Piece<'_>, sink: &mut impl Sink) -> bool {
        let room = sink.room(piece.offset, piece.tcp, piece.bytes.len());
        let crc = self.has_crc.then_some(piece.crc);
        let intact = restore(self.decoder.as_deref_mut(), piece.bytes, crc, room);
        match intact && !piece.withheld {
            true => sink.commit(),
            false => sink.retract(),
        }
        intact
    }

    /// Restores what is held and has come within reach; false if a piece was corrupt, which ends
    /// the epoch.
    fn drain(&mut self, store: &mut Store, sink: &mut impl Sink) -> bool {
        while let Some(target) = self.restorable() {
            let decoder = self.decoder.as_deref_mut();
            self.front.pass_to(target, decoder, store, &mut self.used);
            let held = self.held.pop_first().expect("the target is held");
            let piece = Piece {
                solo: false,
                ahead: 0,
                first: false,
                early: false,
                withheld: held.withheld,
                epoch: self.number,
                offset: target,
                crc: held.crc,
                tcp: &held.tcp.get(),
                bytes: &held.bytes,
            };
            let intact = self.restore(&piece, sink);
            store.give(held.bytes, &mut self.used);
            if !intact {
                self.end(store);
                return false;
            }
        }
        self.front.forget_passed(store, &mut self.used);
        true
    }

    /// Injects all that is held, whatever is missing in front of it; false if a piece was corrupt.
    fn release(&mut self, store: &mut Store, sink: &mut impl Sink) -> bool {
        while let Some(first) = self.held.first() {
            self.pass_gap(first);
            if !self.drain(store, sink) {
                return false;
            }
        }
        true
    }

    /// Goes on at a held piece, whatever is missing in front of it.
    fn pass_gap(&mut self, first: u64) {
        self.front.move_to(first);
        self.loose = first;
    }

    /// Begins without its first piece: TCP has sent again, up to `alone_to`, what lies in front of
    /// those that are held, and without a chain nothing hangs on where the epoch began.
    fn begin_behind(&mut self, alone_to: u64) {
        if self.decoder.is_none()
            && self.front.next().is_none()
            && self.held_start.is_none()
            && let Some(first) = self.held.first().filter(|first| *first <= alone_to)
        {
            self.pass_gap(first);
        }
    }

    /// Goes on at a start that was held back.
    fn pass_start(&mut self) {
        if let Some(start) = self.held_start.take() {
            self.front.move_to(start);
        }
    }

    /// The first held piece, if the stream is known up to it.
    fn restorable(&self) -> Option<u64> {
        let first = self.held.first()?;
        (first <= self.front.reach()?).then_some(first)
    }

    /// Whether a piece beyond `offset` is held.
    fn waits_beyond(&self, offset: u64) -> bool {
        self.held.last().is_some_and(|last| offset < last)
    }

    /// The chain has ended somewhere behind what is held: plain bytes from there on lie beyond it, or were kept for
    /// pieces that are late, which TCP sends again if it must.
    fn forget_beyond_held(&mut self, store: &mut Store) {
        match self.held.last() {
            Some(last) => self.front.forget_from(last, store, &mut self.used),
            None => self.front.forget_all(store, &mut self.used),
        }
    }

    fn hold(&mut self, piece: &Piece<'_>, store: &mut Store) -> ChunkOutcome {
        if self.held.contains(piece.offset) {
            return ChunkOutcome::Duplicate;
        }
        let Some(bytes) = store.take(piece.bytes, &mut self.used) else {
            return ChunkOutcome::NoRoom;
        };
        let held = Held {
            crc: piece.crc,
            withheld: piece.withheld,
            tcp: OwnedFields::new(piece.tcp),
            bytes,
        };
        self.held.insert(piece.offset, held);
        ChunkOutcome::Held
    }

    /// Whether `acked` lies beyond a gap in front of held pieces, which nothing will close then.
    fn is_passed_by(&self, acked: u64) -> bool {
        let Some(first) = self.held.first() else {
            return false;
        };
        // Where a chain whose start is missing begins is not known.
        acked > self.front.reach().unwrap_or(first)
    }

    /// Ends it although what it holds may be missed.
    fn abandon(&mut self, store: &mut Store) {
        store.abandoned += self.held.len() as u64;
        self.end(store);
    }

    fn end(&mut self, store: &mut Store) {
        self.broken = true;
        self.held_start = None;
        while let Some(held) = self.held.pop_first() {
            store.give(held.bytes, &mut self.used);
        }
        self.front.forget_all(store, &mut self.used);
    }
}

#[cfg(test)]
mod tests;
