//! One direction of a connection, as a kernel sends it, and what smoltcp 0.14 makes of it.

use std::collections::BTreeSet;
use std::time::Duration;

use dibs_core::Time;
use dibs_wire::SeqNumber;
use dibs_wire::packet::{Segment, flags};

use super::MOST_ROOM;
use crate::offload;

/// Beyond all timeouts of smoltcp: who has not sent again by then has forgotten it.
const FORGOTTEN: Duration = Duration::from_secs(90);

#[derive(Clone, Debug)]
pub(super) struct Track {
    /// The number of the SYN.
    first: SeqNumber,
    /// The number behind the highest one that went out, and the one that the far end waits for.
    pub(super) top: SeqNumber,
    pub(super) una: SeqNumber,
    /// The number behind the highest one that smoltcp believes to have sent.
    pub(super) sent: SeqNumber,
    /// When something with numbers was sent last, if the connection is not over.
    pub(super) sent_at: Option<Time>,
    /// The byte before `top`, if it is one.
    pub(super) last: Option<u8>,
    /// Where the FIN stands, and how many bare acknowledgements came up to it.
    pub(super) fin: Option<(SeqNumber, u32)>,
    /// Windows that the far end and this one announced last.
    pub(super) theirs: u16,
    pub(super) ours: u16,
    /// What this end acknowledged last.
    pub(super) acked: Option<SeqNumber>,
    /// The far end's last segment that smoltcp took.
    heard: Option<Vec<u8>>,
    /// The numbers that urgent pointers said.
    pub(super) urgents: BTreeSet<u32>,
}

/// What becomes of a segment that comes.
#[derive(Debug, Default)]
pub(super) struct Heard {
    /// smoltcp does not get it.
    pub(super) withheld: bool,
    /// Segment that it gets before it.
    pub(super) before: Option<Vec<u8>>,
    /// It gets this three times behind it.
    pub(super) repetition: Option<Vec<u8>>,
}

/// True if a number lies beyond all windows of a kernel that has `acked` so much, which answers it and looks no further.
pub(super) fn is_outside(seq: SeqNumber, acked: SeqNumber) -> bool {
    seq.distance_from(acked).unsigned_abs() > MOST_ROOM
}

/// The number behind a segment.
pub(super) fn end(s: &Segment<'_>) -> SeqNumber {
    s.seq
        .add(s.payload.len() as u32 + u32::from(s.has(flags::FIN)))
}

impl Track {
    /// That of a SYN.
    pub(super) fn new(s: &Segment<'_>) -> Self {
        let top = s.seq.add(1);
        Self {
            first: s.seq,
            top,
            una: s.seq,
            sent: top,
            sent_at: None,
            last: None,
            fin: None,
            theirs: s.window,
            ours: s.window,
            acked: s.has(flags::ACK).then_some(s.ack),
            heard: None,
            urgents: BTreeSet::new(),
        }
    }

    /// Learns from a segment of the far end.
    pub(super) fn hear(&mut self, packet: &[u8], s: &Segment<'_>) -> Heard {
        let opened = self.theirs == 0 && s.window != 0;
        let repeats = self.repeats_with_news(s);
        let takes = repeats || self.takes(s);
        if takes {
            self.una = s.ack;
            self.theirs = s.window;
            if !s.has(flags::SYN) {
                self.heard = Some(packet.to_vec());
            }
        }
        Heard {
            withheld: self.acknowledges_unsent(s) || self.repeats_up_to_fin(s),
            before: repeats.then(|| self.repeated(end(s))).flatten(),
            // smoltcp forgets its timer when a closed window opens, and would never send again what was lost.
            repetition: (takes && opened && self.waits())
                .then(|| self.repeated(end(s)))
                .flatten(),
        }
    }

    /// Whether smoltcp takes the acknowledgement and the window of this. It does not where all numbers
    /// are old, as of a segment that only asks for an answer.
    fn takes(&self, s: &Segment<'_>) -> bool {
        let fresh = self.acked.is_none_or(|acked| match end(s) == s.seq {
            true => !acked.is_after(s.seq),
            false => end(s).is_after(acked),
        });
        let acks = !self.una.is_after(s.ack) && !s.ack.is_after(self.top);
        fresh && acks && s.has(flags::ACK) && !s.has(flags::RST)
    }

    /// True if this repeats only the latest bytes that this end has, and acknowledges something new. Linux takes that acknowledgement
    /// (`tcp_sequence` in net/ipv4/tcp_input.c), smoltcp does not: two ends whose probes of closed windows arrived would never hear so.
    fn repeats_with_news(&self, s: &Segment<'_>) -> bool {
        let is_data = !s.payload.is_empty() && s.flags & !flags::PSH == flags::ACK;
        let acks = s.ack.is_after(self.una) && !s.ack.is_after(self.top);
        is_data && acks && self.acked == Some(end(s))
    }

    /// True if this acknowledges what was not sent. Linux drops that, once the handshake is over; smoltcp takes it for what waits to be
    /// sent.
    fn acknowledges_unsent(&self, s: &Segment<'_>) -> bool {
        let ends = s.flags & (flags::SYN | flags::RST) != 0;
        let acked = self.acked.filter(|_| s.has(flags::ACK) && !ends);
        let is_near = acked.is_some_and(|acked| !is_outside(s.seq, acked));
        is_near && self.una != self.first && s.ack.is_after(self.top)
    }

    /// Whether this is a duplicate acknowledgement of everything but a FIN. Three of them make
    /// smoltcp stop its timer and send nothing, so a lost FIN would never be sent again
    /// (`seq_to_transmit` lets a fast retransmission pass only with data).
    fn repeats_up_to_fin(&mut self, s: &Segment<'_>) -> bool {
        let bare = s.payload.is_empty() && s.flags & (flags::SYN | flags::FIN | flags::RST) == 0;
        match &mut self.fin {
            Some((fin, seen)) if bare && s.ack == *fin => {
                *seen += 1;
                *seen > 1
            }
            _ => false,
        }
    }

    /// Whether bytes are under way, or smoltcp believes so.
    fn waits(&self) -> bool {
        let all = self.fin.is_some_and(|(fin, _)| !fin.is_after(self.una));
        self.sent.is_after(self.una) && !all
    }

    /// When it is time to remind smoltcp of what is under way. A TCP sends it again until it is acknowledged;
    /// smoltcp sends empty segments as probes of a closed window once it has sent all that it
    /// has, which nobody answers, and does nothing where its timer meets a window that closed meanwhile.
    pub(super) fn due(&self) -> Option<Time> {
        let is_sent = self.sent.is_after(self.una);
        self.sent_at.filter(|_| is_sent).map(|t| t + FORGOTTEN)
    }

    /// Whether that has come.
    pub(super) fn is_due(&self, now: Time) -> bool {
        self.due().is_some_and(|due| due <= now)
    }

    /// The FIN once more, with this TSval, if it is all that the far end waits for: its window closed before smoltcp's timer, which probes
    /// that from then on.
    pub(super) fn fin_again(&self, tsval: u32) -> Option<Vec<u8>> {
        let (fin, _) = self.fin.filter(|(fin, _)| *fin == self.una)?;
        let (heard, acked) = (self.heard.as_ref()?, self.acked?);
        Some(offload::rewrite(heard, |headers, payload| {
            headers.tuple = headers.tuple.reversed();
            (headers.seq, headers.ack, headers.window) = (fin, acked, self.ours);
            (headers.flags, headers.urgent) = (flags::FIN | flags::ACK, 0);
            headers.timestamps = headers.timestamps.map(|(theirs, _)| (tsval, theirs));
            payload.clear();
        }))
    }

    /// The far end's last word once more, without content.
    pub(super) fn repetition(&self) -> Option<Vec<u8>> {
        self.repeated(self.acked?)
    }

    fn repeated(&self, seq: SeqNumber) -> Option<Vec<u8>> {
        let bare = |packet: &Vec<u8>| {
            offload::rewrite(packet, |headers, payload| {
                headers.seq = seq;
                headers.flags = flags::ACK;
                headers.urgent = 0;
                payload.clear();
            })
        };
        self.heard.as_ref().map(bare)
    }

    /// The number of a bare acknowledgement: none beyond the far end's window, which that would not take (Linux, `tcp_acceptable_seq` in
    /// net/ipv4/tcp_output.c). smoltcp probes a closed window by bytes beyond it.
    pub(super) fn acceptable(&self, scale: u8) -> SeqNumber {
        let edge = self.una.add(u32::from(self.theirs) << scale);
        match self.top.is_after(edge) {
            true => edge,
            false => self.top,
        }
    }

    /// How much of this segment may go out, if not all of it may: nothing that is new and beyond the far
    /// end's window, unless it goes on where the last one ended. Then smoltcp has looked at the window.
    pub(super) fn room(&self, s: &Segment<'_>, scale: u8) -> Option<usize> {
        let end = end(s);
        // A closed window takes a byte, as a probe.
        let edge = self.una.add((u32::from(self.theirs) << scale).max(1));
        let limit = if edge.is_after(self.top) {
            edge
        } else {
            self.top
        };
        let ordinary = s.seq == self.sent || s.flags & (flags::SYN | flags::RST) != 0;
        let beyond = !ordinary && end != s.seq && end.is_after(limit);
        beyond.then(|| limit.distance_from(s.seq).max(0) as usize)
    }
}
