//! The body of an acknowledgement frame: received ranges and the delay of the report.
//!
//! Coded as in RFC 9000, 19.3: the largest number, the delay in microseconds, the number of further
//! ranges, the length of the first range, then gap and length of each further range, downward; and if there
//! are any, the number of datagrams that came with a congestion mark (ECN).

use super::ranges::SeqRange;
use smallvec::SmallVec;

/// Ranges that one frame carries at most.
pub const MAX_ACK_RANGES: usize = 32;

/// Largest value that a variable-length integer holds (RFC 9000, 16).
const VARINT_MAX: u64 = (1 << 62) - 1;

/// An acknowledgement that cannot be: the peer's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AckError {
    /// It names a datagram that was never sent.
    #[error("datagram {0} acknowledged, but never sent")]
    NeverSent(u64),
}

/// Acknowledgement: datagrams that the peer says to have received on this path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AckFrame {
    delay_us: u32,
    /// Never empty; descending, with at least one number missing between two ranges.
    ranges: SmallVec<[SeqRange; MAX_ACK_RANGES]>,
    marked: u64,
}

/// A malformed acknowledgement: the peer's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AckDecodeError {
    /// The body ends within a field.
    #[error("acknowledgement ends within a field")]
    Truncated,
    /// Bytes follow the last field.
    #[error("bytes follow the last field of an acknowledgement")]
    TrailingBytes,
    /// More ranges than [`MAX_ACK_RANGES`].
    #[error("acknowledgement with {0} ranges")]
    TooManyRanges(u64),
    /// A range reaches below number zero.
    #[error("acknowledged range reaches below zero")]
    BelowZero,
}

impl AckFrame {
    /// A frame of `ranges`, which descend with at least one number missing between two.
    ///
    /// `None` if they do not, if there are none, or more than [`MAX_ACK_RANGES`].
    pub fn new(delay_us: u32, ranges: &[SeqRange]) -> Option<Self> {
        let apart = ranges.windows(2).all(|w| w[1].end + 1 < w[0].start);
        let valid = ranges
            .iter()
            .all(|r| r.start <= r.end && r.end <= VARINT_MAX);
        (apart && valid && (1..=MAX_ACK_RANGES).contains(&ranges.len())).then(|| Self {
            delay_us,
            ranges: SmallVec::from_slice(ranges),
            marked: 0,
        })
    }

    /// The same, and so many datagrams came with a congestion mark.
    pub const fn with_marked(mut self, marked: u64) -> Self {
        self.marked = marked;
        self
    }

    /// The largest number acknowledged.
    pub fn largest(&self) -> u64 {
        self.ranges[0].end
    }

    /// Microseconds between the receipt of the largest number and the sending of this frame.
    pub const fn delay_us(&self) -> u32 {
        self.delay_us
    }

    /// Datagrams that came with a congestion mark, since the path began.
    pub const fn marked(&self) -> u64 {
        self.marked
    }

    /// The ranges, the highest first.
    pub fn ranges(&self) -> &[SeqRange] {
        &self.ranges
    }

    /// Appends the coded frame to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let ranges = self.ranges.iter().copied();
        encode(self.delay_us, ranges, self.marked, usize::MAX, out);
    }

    /// Reads a frame that fills `body`. Any input is safe.
    pub fn decode(mut body: &[u8]) -> Result<Self, AckDecodeError> {
        let b = &mut body;
        let largest = take_varint(b)?;
        let delay_us = u32::try_from(take_varint(b)?).unwrap_or(u32::MAX);
        let more = take_varint(b)?;
        if more >= MAX_ACK_RANGES as u64 {
            return Err(AckDecodeError::TooManyRanges(more.saturating_add(1)));
        }
        let mut ranges = SmallVec::new();
        let mut end = largest;
        for i in 0..=more {
            if i > 0 {
                let gap = take_varint(b)? + 2;
                let start = ranges.last().map_or(0, |r: &SeqRange| r.start);
                end = start.checked_sub(gap).ok_or(AckDecodeError::BelowZero)?;
            }
            let start = end
                .checked_sub(take_varint(b)?)
                .ok_or(AckDecodeError::BelowZero)?;
            ranges.push(SeqRange { start, end });
        }
        let marked = match b.is_empty() {
            true => 0,
            // That there are none is not told.
            false => match take_varint(b)? {
                0 => return Err(AckDecodeError::TrailingBytes),
                marked => marked,
            },
        };
        if !b.is_empty() {
            return Err(AckDecodeError::TrailingBytes);
        }
        Ok(Self {
            delay_us,
            ranges,
            marked,
        })
    }
}

/// Appends a frame of `descending` ranges and a count of marks to `out`, as many ranges as fit into `max_len` bytes and
/// [`MAX_ACK_RANGES`]; false, and nothing appended, if not even the first does.
pub(super) fn encode(
    delay_us: u32,
    descending: impl Iterator<Item = SeqRange> + Clone,
    marked: u64,
    max_len: usize,
    out: &mut Vec<u8>,
) -> bool {
    // The count stands before the ranges: it fits one byte, so it costs the same whatever it is.
    const COUNT_LEN: usize = 1;
    const { assert!(MAX_ACK_RANGES <= 64) };

    let mut ranges = descending.clone();
    let Some(first) = ranges.next() else {
        return false;
    };
    let first_len = first.end - first.start;
    let mut len =
        varint_len(first.end) + varint_len(u64::from(delay_us)) + COUNT_LEN + varint_len(first_len);
    if marked > 0 {
        len += varint_len(marked);
    }
    if len > max_len {
        return false;
    }
    let mut more = 0u64;
    let mut below = first.start;
    for r in ranges.take(MAX_ACK_RANGES - 1) {
        len += varint_len(below - r.end - 2) + varint_len(r.end - r.start);
        if len > max_len {
            break;
        }
        below = r.start;
        more += 1;
    }

    put_varint(first.end, out);
    put_varint(u64::from(delay_us), out);
    put_varint(more, out);
    put_varint(first_len, out);
    let mut below = first.start;
    for r in descending.skip(1).take(more as usize) {
        put_varint(below - r.end - 2, out);
        put_varint(r.end - r.start, out);
        below = r.start;
    }
    if marked > 0 {
        put_varint(marked, out);
    }
    true
}

const fn varint_len(v: u64) -> usize {
    match v {
        0..=0x3f => 1,
        0x40..=0x3fff => 2,
        0x4000..=0x3fff_ffff => 4,
        _ => 8,
    }
}

fn put_varint(v: u64, out: &mut Vec<u8>) {
    match varint_len(v) {
        1 => out.push(v as u8),
        2 => out.extend_from_slice(&(v as u16 | 1 << 14).to_be_bytes()),
        4 => out.extend_from_slice(&(v as u32 | 2 << 30).to_be_bytes()),
        _ => out.extend_from_slice(&(v | 3 << 62).to_be_bytes()),
    }
}

fn take_varint(b: &mut &[u8]) -> Result<u64, AckDecodeError> {
    let (&first, _) = b.split_first().ok_or(AckDecodeError::Truncated)?;
    let (field, rest) = b
        .split_at_checked(1 << (first >> 6))
        .ok_or(AckDecodeError::Truncated)?;
    *b = rest;
    let value = field.iter().fold(0u64, |v, &byte| v << 8 | u64::from(byte));
    // The two top bits of the first byte were the length.
    Ok(value & (u64::MAX >> (66 - 8 * field.len() as u32)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::world::Rng;
    use super::*;

    #[test]
    fn varints_of_each_length_come_back() {
        for v in [0, 63, 64, 16383, 16384, (1 << 30) - 1, 1 << 30, VARINT_MAX] {
            let mut out = Vec::new();
            put_varint(v, &mut out);
            assert_eq!(out.len(), varint_len(v));
            let mut b = &out[..];
            assert_eq!(take_varint(&mut b), Ok(v));
            assert!(b.is_empty());
        }
    }

    fn random_frame(rng: &mut Rng) -> AckFrame {
        let scale = [4, 100, 100_000, 1 << 40][rng.below(4) as usize];
        let mut end = 1 << 50;
        let mut ranges = Vec::new();
        for _ in 0..=rng.below(MAX_ACK_RANGES as u64) {
            let start = end - rng.below(scale);
            ranges.push(SeqRange { start, end });
            end = start - 2 - rng.below(scale);
        }
        ranges.truncate(MAX_ACK_RANGES);
        let marked = [0, rng.below(scale)][rng.below(2) as usize];
        let frame = AckFrame::new(rng.below(1 << 32) as u32, &ranges);
        frame.unwrap().with_marked(marked)
    }

    #[test]
    fn frames_come_back() {
        let mut rng = Rng::new(1);
        for _ in 0..2000 {
            let frame = random_frame(&mut rng);
            let mut out = Vec::new();
            frame.encode(&mut out);
            assert_eq!(AckFrame::decode(&out), Ok(frame));
        }
    }

    #[test]
    fn a_short_frame_keeps_the_highest_ranges() {
        let mut rng = Rng::new(2);
        for _ in 0..2000 {
            let frame = random_frame(&mut rng);
            let max = rng.below(64) as usize;
            let mut out = Vec::new();
            let ranges = frame.ranges.iter().copied();
            if encode(frame.delay_us, ranges, frame.marked, max, &mut out) {
                assert!(out.len() <= max);
                let short = AckFrame::decode(&out).unwrap();
                assert_eq!(short.marked, frame.marked);
                assert!(frame.ranges.starts_with(&short.ranges));
            } else {
                assert!(out.is_empty() && max < 33);
            }
        }
    }

    #[test]
    fn any_input_is_safe_and_what_is_accepted_is_well_formed() {
        let mut rng = Rng::new(3);
        let mut accepted = 0;
        for _ in 0..50_000 {
            let mut input = Vec::new();
            if rng.below(2) == 0 {
                random_frame(&mut rng).encode(&mut input);
                for _ in 0..1 + rng.below(3) {
                    let at = rng.below(input.len() as u64) as usize;
                    input[at] = rng.below(256) as u8;
                }
            } else {
                input.extend((0..rng.below(24)).map(|_| rng.below(256) as u8));
            }
            if let Ok(frame) = AckFrame::decode(&input) {
                accepted += 1;
                assert!(AckFrame::new(frame.delay_us, &frame.ranges).is_some());
            }
        }
        assert!(accepted > 1000, "{accepted}");
    }

    #[test]
    fn a_frame_below_zero_or_too_long_is_refused() {
        assert_eq!(
            AckFrame::decode(&[5, 0, 0, 6]),
            Err(AckDecodeError::BelowZero)
        );
        assert_eq!(
            AckFrame::decode(&[5, 0, 1, 5, 0, 0]),
            Err(AckDecodeError::BelowZero)
        );
        assert_eq!(
            AckFrame::decode(&[5, 0, 32, 0]),
            Err(AckDecodeError::TooManyRanges(33))
        );
        assert_eq!(AckFrame::decode(&[5, 0, 0]), Err(AckDecodeError::Truncated));
        assert_eq!(
            AckFrame::decode(&[5, 0, 0, 0, 0]),
            Err(AckDecodeError::TrailingBytes)
        );
    }
}
