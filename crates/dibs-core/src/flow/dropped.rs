//! A copy of a segment that CoDel dropped.

use dibs_wire::SeqNumber;
use dibs_wire::packet::Segment;

use crate::buffer::{Buffer, Pool};
use crate::tcp_fields;
use crate::time::Time;

/// A segment that CoDel dropped.
pub struct DroppedSegment {
    /// A packet of its own.
    pub buffer: Buffer,
    /// The number of its first byte.
    pub seq: SeqNumber,
    /// Payload bytes.
    pub len: usize,
    /// When TCP should have sent it again. Another one of the connection is due at another moment.
    pub due: Time,
}

impl DroppedSegment {
    /// Copies `len` payload bytes of `segment` from `done` on.
    pub fn copy(
        pool: &mut Pool,
        due: Time,
        segment: &Segment<'_>,
        done: usize,
        len: usize,
    ) -> Self {
        let tcp = tcp_fields::of_segment(segment, segment.meta);
        let tcp = tcp_fields::of_piece(&tcp, done, done + len == segment.payload.len());
        let seq = segment.seq.add(done as u32);
        let headers = tcp_fields::headers(segment.tuple, segment.meta, seq, &tcp);
        let payload_at = headers.encoded_len();
        let mut buffer = pool.take_for(payload_at + len);
        headers.write(&mut buffer, len, 0);
        buffer[payload_at..payload_at + len].copy_from_slice(&segment.payload[done..done + len]);
        Self {
            buffer,
            seq,
            len,
            due,
        }
    }

    /// True if all of it is among `len` bytes from `seq` on.
    pub fn is_in(&self, seq: SeqNumber, len: usize) -> bool {
        let (own_end, end) = (self.seq.add(self.len as u32), seq.add(len as u32));
        !seq.is_after(self.seq) && !own_end.is_after(end)
    }
}
