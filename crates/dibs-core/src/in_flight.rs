//! What waits for an acknowledgement.
//!
//! Chunks are kept, datagrams never (docs/threat-model.md): a lost chunk is encoded anew, under a fresh
//! sequence number, by a path that its placement allows.

use std::collections::VecDeque;

use smallvec::SmallVec;

use crate::buffer::{Buffer, Pool};
use crate::chunk::{Chunk, Content, Fragment, Message, Origin, Placement, SegmentMeta, ShareOf};
use crate::slab::{Key, Slab};
use crate::stream::rx::HELD_OVERHEAD;

/// One thing that waits for an acknowledgement.
#[derive(Clone, Copy, Debug)]
pub struct Pending {
    /// Content that was sent.
    pub content: Content,
    /// Paths that may carry it.
    pub placement: Placement,
    /// How often it has been sent.
    pub sent: u8,
    /// Copies of it that are under way by other paths.
    pub copies: u8,
}

/// Transformed bytes of a run of chunks, in the buffer that they were sent from.
#[derive(Debug)]
struct Batch {
    buffer: Buffer,
    chunks: u32,
    segments: SmallVec<[SegmentMeta; 1]>,
}

/// All that waits, bounded by the bytes it holds and by what the peer can hold.
#[derive(Debug, Default)]
pub struct InFlight {
    /// In order of first sending, from the oldest unacknowledged one on: what comes and goes in turn
    /// lies in turn in memory. The key of each is its number.
    sent: VecDeque<Sent>,
    /// The number of the first.
    first: u64,
    /// How many of them wait.
    pending: usize,
    batches: Slab<Batch>,
    messages: Slab<Message>,
    fragments: Slab<Fragment>,
    batch_bytes: usize,
    span: usize,
}

#[derive(Clone, Copy, Debug)]
enum Sent {
    Waiting(Pending),
    /// Acknowledged or given up; so many bytes.
    Done(u16),
}

impl Sent {
    const fn pending(&self) -> Option<&Pending> {
        match self {
            Self::Waiting(pending) => Some(pending),
            Self::Done(_) => None,
        }
    }
}

impl InFlight {
    /// Bytes sent since the oldest chunk that is not acknowledged: the peer may have to hold as much.
    pub const fn span(&self) -> usize {
        self.span
    }

    /// Bytes that the peer may have to hold: the [`span`](Self::span), and the cost of each piece in it beside its
    /// bytes. This bounds what is remembered here of pieces that were acknowledged behind one that was not.
    pub fn claim(&self) -> usize {
        self.span + self.sent.len() * HELD_OVERHEAD
    }

    /// Bytes of buffers held.
    pub const fn held(&self) -> usize {
        self.batch_bytes
    }

    /// Number of things that wait.
    pub const fn len(&self) -> usize {
        self.pending
    }

    /// True if nothing waits.
    pub const fn is_empty(&self) -> bool {
        self.pending == 0
    }

    /// Keeps a buffer whose chunks are about to be added.
    pub fn add_batch(&mut self, buffer: Buffer) -> Key {
        self.batch_bytes += buffer.len();
        self.batches.insert(Batch {
            buffer,
            chunks: 0,
            segments: SmallVec::new(),
        })
    }

    /// True if a batch still holds something.
    pub fn has_batch(&self, batch: Key) -> bool {
        self.batches.get(batch).is_some()
    }

    /// The bytes of a batch.
    ///
    /// # Panics
    /// If it holds no chunk any more.
    pub fn batch(&self, batch: Key) -> &[u8] {
        &self
            .batches
            .get(batch)
            .expect("a batch lives as long as its chunks")
            .buffer
    }

    /// The bytes of a batch, to be filled.
    pub fn batch_mut(&mut self, batch: Key) -> &mut [u8] {
        &mut self
            .batches
            .get_mut(batch)
            .expect("a batch lives as long as its chunks")
            .buffer
    }

    /// Adds what the next chunks of a batch have in common; its number in the batch.
    ///
    /// # Panics
    /// If the batch holds no chunk any more.
    pub fn add_segment(&mut self, batch: Key, segment: SegmentMeta) -> u16 {
        let batch = self.batches.get_mut(batch).expect("the batch is there");
        batch.segments.push(segment);
        u16::try_from(batch.segments.len() - 1).expect("a batch has fewer chunks than that")
    }

    /// Fields that a chunk that waits has in common with others.
    ///
    /// # Panics
    /// If the chunk does not wait.
    pub fn segment(&self, chunk: &Chunk) -> &SegmentMeta {
        self.segment_at(chunk.batch, chunk.segment)
    }

    /// Fields that a share that waits has in common with others.
    ///
    /// # Panics
    /// If the share does not wait.
    pub fn segment_of_share(&self, share: &ShareOf) -> &SegmentMeta {
        self.segment_at(share.batch, share.segment)
    }

    fn segment_at(&self, batch: Key, segment: u16) -> &SegmentMeta {
        let batch = self.batches.get(batch);
        let batch = batch.expect("a batch lives as long as its chunks");
        &batch.segments[usize::from(segment)]
    }

    /// Origin of anything that waits, if that belongs to a chain.
    pub fn origin(&self, content: &Content) -> Option<Origin> {
        match content {
            Content::Chunk(chunk) => Some(chunk.origin(self.segment(chunk))),
            Content::Fragment { key, .. } => Some(self.fragment(*key).origin),
            Content::Share(share) => {
                let SegmentMeta { conn, chain, .. } = self.segment_of_share(share);
                Some(Origin {
                    conn: *conn,
                    incarnation: chain.incarnation,
                    epoch: Some(chain.epoch),
                })
            }
            Content::Control(_) | Content::Opened { .. } => None,
        }
    }

    /// The message of a [`Content::Control`] that waits.
    ///
    /// # Panics
    /// If it does not wait.
    pub fn message(&self, key: Key) -> &Message {
        self.messages
            .get(key)
            .expect("a message waits with its content")
    }

    /// The fragment of a [`Content::Fragment`] that waits.
    ///
    /// # Panics
    /// If it does not wait.
    pub fn fragment(&self, key: Key) -> &Fragment {
        self.fragments
            .get(key)
            .expect("a fragment waits with its content")
    }

    /// Number of messages that wait for their acknowledgement.
    pub fn messages(&self) -> usize {
        self.messages.len()
    }

    /// Adds a message that has been sent once.
    pub fn add_message(&mut self, message: Message) -> Key {
        let key = self.messages.insert(message);
        self.add(Content::Control(key), Placement::Any)
    }

    /// Adds a fragment that has been sent once.
    pub fn add_fragment(&mut self, fragment: Fragment, placement: Placement) -> Key {
        let Fragment { batch, len, .. } = fragment;
        let key = self.fragments.insert(fragment);
        self.add(Content::Fragment { key, batch, len }, placement)
    }

    /// Adds something that has been sent once.
    // Inlined, or what was just written in parts is copied whole, which has to wait for the writes.
    #[inline(always)]
    pub fn add(&mut self, content: Content, placement: Placement) -> Key {
        if let Some(batch) = content.batch() {
            let batch = self.batches.get_mut(batch);
            batch.expect("a piece's batch is there").chunks += 1;
        }
        self.span += content.payload_len();
        self.pending += 1;
        self.sent.push_back(Sent::Waiting(Pending {
            content,
            placement,
            sent: 1,
            copies: 0,
        }));
        Key::from_u64(self.first + self.sent.len() as u64 - 1)
    }

    /// Says what a chunk's CRC is that was added before it was known.
    ///
    /// # Panics
    /// If no chunk waits under this key.
    pub fn set_crc(&mut self, key: Key, crc: u32) {
        match self.get_mut(key) {
            Some(Pending {
                content: Content::Chunk(chunk),
                ..
            }) => chunk.crc = crc,
            _ => panic!("only a waiting chunk has a CRC"),
        }
    }

    /// True if any byte of a connection waits.
    pub fn has(&self, conn: Key) -> bool {
        // A batch lives as long as its chunks, of which others may be another connection's.
        let of_batch = |(_, batch): (Key, &Batch)| batch.segments.iter().any(|s| s.conn == conn);
        let mut fragments = self.fragments.iter();
        let might =
            self.batches.iter().any(of_batch) || fragments.any(|(_, f)| f.origin.conn == conn);
        let mut waiting = self.sent.iter().filter_map(Sent::pending);
        might && waiting.any(|p| self.origin(&p.content).is_some_and(|o| o.conn == conn))
    }

    fn place(&self, key: Key) -> Option<usize> {
        usize::try_from(key.to_u64().checked_sub(self.first)?).ok()
    }

    /// Entry that waits under this key.
    pub fn get(&self, key: Key) -> Option<&Pending> {
        self.sent.get(self.place(key)?)?.pending()
    }

    /// Entry that waits under this key.
    pub fn get_mut(&mut self, key: Key) -> Option<&mut Pending> {
        let place = self.place(key)?;
        match self.sent.get_mut(place)? {
            Sent::Waiting(pending) => Some(pending),
            Sent::Done(_) => None,
        }
    }

    /// The key of what is added next.
    pub fn next_key(&self) -> Key {
        Key::from_u64(self.first + self.sent.len() as u64)
    }

    /// Unacknowledged entries that were added as `from` and later, with their keys.
    pub fn since(&self, from: Key) -> impl Iterator<Item = (Key, &Pending)> {
        let skipped = from.to_u64().saturating_sub(self.first);
        let places = self.sent.iter().enumerate().skip(skipped as usize);
        places
            .filter_map(|(at, sent)| Some((Key::from_u64(self.first + at as u64), sent.pending()?)))
    }

    /// The one that was sent first.
    pub fn oldest(&self) -> Option<(Key, &Pending)> {
        let pending = self.sent.front()?.pending();
        let pending = pending.expect("what is done leaves the front");
        Some((Key::from_u64(self.first), pending))
    }

    /// Puts what waits under `key` behind all others, under the key that it gives.
    ///
    /// # Panics
    /// If nothing does.
    pub fn postpone(&mut self, key: Key) -> Key {
        let place = self.place(key).expect("it waits");
        let pending = *self.sent[place].pending().expect("it waits");
        let len = pending.content.payload_len();
        self.sent[place] = Sent::Done(len as u16);
        self.sent.push_back(Sent::Waiting(pending));
        self.span += len;
        let new = Key::from_u64(self.first + self.sent.len() as u64 - 1);
        self.forget_done();
        new
    }

    fn forget_done(&mut self) {
        while let Some(&Sent::Done(len)) = self.sent.front() {
            self.sent.pop_front();
            self.span -= usize::from(len);
            self.first += 1;
        }
    }

    /// Takes out what was acknowledged or given up; its buffer goes back when it was the last.
    pub fn remove(&mut self, key: Key, pool: &mut Pool) -> Option<Pending> {
        let place = self.place(key)?;
        let sent = self.sent.get_mut(place)?;
        let pending = *sent.pending()?;
        *sent = Sent::Done(pending.content.payload_len() as u16);
        self.pending -= 1;
        match pending.content {
            Content::Control(key) => drop(self.messages.remove(key)),
            Content::Fragment { key, .. } => drop(self.fragments.remove(key)),
            Content::Chunk(_) | Content::Share(_) | Content::Opened { .. } => {}
        }
        if let Some(batch) = pending.content.batch() {
            self.release(batch, pool);
        }
        self.forget_done();
        Some(pending)
    }

    /// Moves the first `used` bytes of a batch, which are all that its chunks lie in, to a smaller buffer if there
    /// is one that holds them: it waits as long as they do.
    pub fn shrink_batch(&mut self, batch: Key, used: usize, pool: &mut Pool) {
        let batch = self.batches.get_mut(batch).expect("it was just filled");
        if Pool::len_for(used) < batch.buffer.len() {
            let mut buffer = pool.take_for(used);
            buffer[..used].copy_from_slice(&batch.buffer[..used]);
            let large = std::mem::replace(&mut batch.buffer, buffer);
            self.batch_bytes -= large.len() - batch.buffer.len();
            pool.give(large);
        }
    }

    /// Gives a buffer back to which no chunk was added.
    pub fn drop_empty_batch(&mut self, batch: Key, pool: &mut Pool) {
        let b = self.batches.remove(batch).expect("it was just added");
        assert_eq!(b.chunks, 0, "a batch with chunks lives as long as they");
        self.batch_bytes -= b.buffer.len();
        pool.give(b.buffer);
    }

    /// The messages that wait, in their order; and nothing waits any more.
    pub fn drain(&mut self, pool: &mut Pool) -> Vec<Message> {
        let mut messages = Vec::new();
        for key in self.first..self.first + self.sent.len() as u64 {
            let key = Key::from_u64(key);
            if let Some(Content::Control(message)) = self.get(key).map(|p| p.content) {
                messages.extend(self.messages.remove(message));
            }
            self.remove(key, pool);
        }
        messages
    }

    fn release(&mut self, batch: Key, pool: &mut Pool) {
        let b = self
            .batches
            .get_mut(batch)
            .expect("a batch lives as long as its chunks");
        b.chunks -= 1;
        if b.chunks == 0 {
            let b = self.batches.remove(batch).expect("it was just seen");
            self.batch_bytes -= b.buffer.len();
            pool.give(b.buffer);
        }
    }
}

#[cfg(test)]
mod tests;
