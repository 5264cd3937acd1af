//! TCP header fields that outlive the packet they came from.

use dibs_wire::emit::Headers;
use dibs_wire::frame::TcpFields;
use dibs_wire::packet::{IpMeta, Segment, flags};
use dibs_wire::{FlowKey, SeqNumber};
use smallvec::SmallVec;

/// Kinds of options (RFC 9293, 3.1; RFC 2018, 3; RFC 7323, 3.2).
const END: u8 = 0;
const NOP: u8 = 1;
const SACK: u8 = 5;
const TIMESTAMPS: u8 = 8;

/// [`TcpFields`] that own their options.
#[derive(Clone, Debug)]
pub struct OwnedFields {
    tcp: TcpFields<'static>,
    options: Option<Box<[u8]>>,
}

impl OwnedFields {
    /// Copies the fields.
    pub fn new(tcp: &TcpFields<'_>) -> Self {
        let options = tcp.options.map(Box::from);
        Self {
            tcp: TcpFields {
                options: None,
                ..*tcp
            },
            options,
        }
    }

    /// The fields.
    pub fn get(&self) -> TcpFields<'_> {
        TcpFields {
            options: self.options.as_deref(),
            ..self.tcp
        }
    }

    /// The flag bits.
    pub const fn flags(&self) -> u16 {
        self.tcp.flags
    }

    /// Takes PSH and FIN over from the last piece of a superpacket.
    pub const fn merge_last(&mut self, last: u16) {
        self.tcp.flags |= last & (flags::PSH | flags::FIN);
    }

    /// True if a piece with these fields can follow in the same superpacket.
    pub fn joins(&self, tcp: &TcpFields<'_>) -> bool {
        let own = &self.tcp;
        let varying = flags::PSH | flags::FIN | flags::CWR;
        // As one number each: two were just written where one would be read.
        let times = |t: (u32, u32)| u64::from(t.0) << 32 | u64::from(t.1);
        own.flags & !varying == tcp.flags & !varying
            && own.ack == tcp.ack
            && own.window == tcp.window
            && own.timestamps.map(times) == tcp.timestamps.map(times)
            && own.meta == tcp.meta
            && self.options.as_deref() == tcp.options
            && tcp.urgent.is_none()
    }

    /// The piece that brought a FIN is gone.
    pub const fn clear_fin(&mut self) {
        self.tcp.flags &= !flags::FIN;
    }
}

/// The fields of a segment, with what the flow's `meta` already says left out.
pub fn of_segment<'a>(segment: &Segment<'a>, meta: IpMeta) -> TcpFields<'a> {
    let plain = segment.has_plain_options();
    TcpFields {
        flags: segment.flags,
        window: segment.window,
        ack: segment.ack,
        timestamps: if plain { segment.timestamps } else { None },
        meta: (segment.meta != meta).then_some(segment.meta),
        options: (!plain).then_some(segment.options),
        urgent: segment.has(flags::URG).then_some(segment.urgent),
    }
}

/// The header fields of one piece: PSH and FIN belong to the last, CWR to the first, and an urgent
/// pointer counts from the piece's own number.
pub fn of_piece<'a>(tcp: &TcpFields<'a>, done: usize, last: bool) -> TcpFields<'a> {
    let mut piece = *tcp;
    if !last {
        piece.flags &= !(flags::PSH | flags::FIN | flags::RST);
    }
    if done > 0 {
        piece.flags &= !flags::CWR;
    }
    if let Some(urgent) = tcp.urgent {
        let rest = usize::from(urgent).saturating_sub(done);
        if rest == 0 && done > 0 {
            piece.flags &= !flags::URG;
        }
        // The field stays where nothing is urgent any more: all pieces have equally long headers.
        piece.urgent = Some(rest as u16);
    }
    piece
}

/// The headers of a segment of the flow with these ends and this `meta`, with these fields.
pub fn headers<'a>(
    tuple: FlowKey,
    meta: IpMeta,
    seq: SeqNumber,
    tcp: &TcpFields<'a>,
) -> Headers<'a> {
    Headers {
        tuple,
        meta: tcp.meta.unwrap_or(meta),
        seq,
        ack: tcp.ack,
        flags: tcp.flags,
        window: tcp.window,
        urgent: tcp.urgent.unwrap_or(0),
        timestamps: tcp.timestamps,
        options: tcp.options,
    }
}

/// Raises the TSval of the fields to `floor` where it lies behind it, wherever it stands; returns
/// the TSval that results. `scratch` takes the changed options.
///
/// A TSval that goes back in stream order is dropped silently by the receiver (PAWS, RFC 7323, 5).
pub fn raise_tsval<'a>(
    tcp: &mut TcpFields<'a>,
    floor: Option<u32>,
    scratch: &'a mut SmallVec<[u8; 64]>,
) -> Option<u32> {
    let raised = |val: u32| match floor {
        Some(f) if is_behind(val, f) => f,
        _ => val,
    };
    if let Some((val, ecr)) = tcp.timestamps {
        tcp.timestamps = Some((raised(val), ecr));
        return tcp.timestamps.map(|t| t.0);
    }
    let at = find_timestamps(tcp.options?)?;
    scratch.clear();
    scratch.extend_from_slice(tcp.options?);
    let val = raised(u32::from_be_bytes(scratch[at..at + 4].try_into().ok()?));
    scratch[at..at + 4].copy_from_slice(&val.to_be_bytes());
    tcp.options = Some(&*scratch);
    Some(val)
}

/// True if a time stamp lies behind another one.
pub const fn is_behind(val: u32, floor: u32) -> bool {
    floor.wrapping_sub(val) as i32 > 0
}

/// Takes selective acknowledgements of bytes before `end` out, and, where it is given, puts another TSecr
/// in the place of the one that is there, if there is one. `scratch` takes the changed options.
pub fn forget_sacks<'a>(
    tcp: &mut TcpFields<'a>,
    end: SeqNumber,
    tsecr: Option<u32>,
    scratch: &'a mut SmallVec<[u8; 64]>,
) {
    if let Some(((_, known), tsecr)) = tcp.timestamps.as_mut().zip(tsecr) {
        *known = tsecr;
    }
    let Some(options) = tcp.options else { return };
    scratch.clear();
    scratch.extend_from_slice(options);
    if let Some((at, tsecr)) = find_timestamps(options).zip(tsecr) {
        scratch[at + 4..at + 8].copy_from_slice(&tsecr.to_be_bytes());
    }
    if let Some(at) = find(options, SACK) {
        let option = &options[at..at + usize::from(options[at + 1])];
        let of_old = |block: &&[u8; 8]| {
            let [a, b, c, d, ..] = **block;
            end.is_after(SeqNumber::new(u32::from_be_bytes([a, b, c, d])))
        };
        scratch[at..at + option.len()].fill(NOP);
        let mut kept = 2;
        for block in option[2..].as_chunks().0.iter().filter(|b| !of_old(b)) {
            scratch[at + kept..][..8].copy_from_slice(block);
            kept += 8;
        }
        if kept > 2 {
            scratch[at] = SACK;
            scratch[at + 1] = kept as u8;
        }
    }
    tcp.options = Some(&*scratch);
}

/// TSval and TSecr, wherever they stand.
pub fn timestamps(tcp: &TcpFields<'_>) -> Option<(u32, u32)> {
    tcp.timestamps.or_else(|| {
        let options = tcp.options?;
        let at = find_timestamps(options)?;
        let number = |at: usize| Some(u32::from_be_bytes(*options.get(at..)?.first_chunk()?));
        Some((number(at)?, number(at + 4)?))
    })
}

/// Where TSval stands among raw options.
fn find_timestamps(options: &[u8]) -> Option<usize> {
    let at = find(options, TIMESTAMPS)?;
    (options[at + 1] == 10).then_some(at + 2)
}

/// Where an option of this kind begins among raw options; all of it is there.
fn find(options: &[u8], wanted: u8) -> Option<usize> {
    let mut at = 0;
    loop {
        match *options.get(at)? {
            END => return None,
            NOP => at += 1,
            kind => {
                let len = usize::from(*options.get(at + 1)?);
                if len < 2 || options.len() < at + len {
                    return None;
                }
                if kind == wanted {
                    return Some(at);
                }
                at += len;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(options: Option<&[u8]>, timestamps: Option<(u32, u32)>) -> TcpFields<'_> {
        TcpFields {
            flags: flags::ACK,
            window: 1,
            ack: SeqNumber::new(0),
            timestamps,
            meta: None,
            options,
            urgent: None,
        }
    }

    #[test]
    fn tsval_is_raised_over_the_wrap_and_never_lowered() {
        for (val, floor, want) in [
            (5, 9, 9),
            (9, 5, 9),
            (u32::MAX, 3, 3),
            (3, u32::MAX, 3),
            (7, 7, 7),
        ] {
            let mut tcp = fields(None, Some((val, 1)));
            let mut scratch = SmallVec::new();
            assert_eq!(raise_tsval(&mut tcp, Some(floor), &mut scratch), Some(want));
            assert_eq!(tcp.timestamps, Some((want, 1)));
        }
    }

    #[test]
    fn tsval_among_raw_options_is_raised_too() {
        let sack = [
            1, 1, 8, 10, 0, 0, 0, 5, 0, 0, 0, 1, 1, 1, 5, 10, 0, 0, 0, 1, 0, 0, 0, 2,
        ];
        let mut scratch = SmallVec::new();
        let mut tcp = fields(Some(&sack), None);
        assert_eq!(raise_tsval(&mut tcp, Some(9), &mut scratch), Some(9));
        let options = tcp.options.unwrap();
        assert_eq!(options[4..8], [0, 0, 0, 9]);
        assert_eq!(options[8..], sack[8..]);
        assert_eq!(timestamps(&tcp), Some((9, 1)));
    }

    #[test]
    fn old_selective_acknowledgements_are_taken_out_and_nothing_else() {
        let sack = [
            1, 1, 8, 10, 0, 0, 0, 5, 0, 0, 0, 1, 1, 1, 5, 18, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 7,
            0, 0, 0, 9,
        ];
        let without = |end, tsecr| {
            let mut scratch = SmallVec::new();
            let mut tcp = fields(Some(&sack), None);
            forget_sacks(&mut tcp, SeqNumber::new(end), tsecr, &mut scratch);
            assert_eq!(timestamps(&tcp), Some((5, tsecr.unwrap_or(1))));
            tcp.options.unwrap()[12..].to_vec()
        };
        assert_eq!(without(1, None), sack[12..]);
        assert_eq!(without(9, Some(7)), [1; 20]);
        let new = [1, 1, 5, 10, 0, 0, 0, 7, 0, 0, 0, 9, 1, 1, 1, 1, 1, 1, 1, 1];
        assert_eq!(without(7, Some(7)), new);
        // Cut short, and of no length.
        for bad in [&[5, 10, 0, 0][..], &[5], &[5, 0, 1], &[8, 10, 0, 5, 2]] {
            let mut scratch = SmallVec::new();
            let mut tcp = fields(Some(bad), None);
            forget_sacks(&mut tcp, SeqNumber::new(9), Some(7), &mut scratch);
            assert_eq!(tcp.options, Some(bad));
        }
    }

    #[test]
    fn without_timestamps_nothing_changes() {
        let mut tcp = fields(Some(&[2, 4, 5, 180]), None);
        let mut scratch = SmallVec::new();
        assert_eq!(raise_tsval(&mut tcp, Some(9), &mut scratch), None);
        assert_eq!(tcp.options, Some(&[2, 4, 5, 180][..]));
    }
}
