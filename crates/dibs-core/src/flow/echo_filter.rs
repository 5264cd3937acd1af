//! Keeps a kernel from misjudging an outage.
//!
//! The first acknowledgements after an outage may cover bytes that arrived before it, and echo time
//! stamps from then. Linux takes that as proof that nothing was lost: it undoes the recovery that its
//! timeouts began, measures a round trip as long as the outage, and waits accordingly. So as long as
//! what the peer echoes is from before, it is handed on without an echo, which measures nothing; and
//! before the kernel has sent again, as a repetition of the latest acknowledgement that it knows,
//! which makes it do so at once.
//!
//! Selective acknowledgements that did not get here before the outage are such proof too, whenever they
//! come: of what was never sent again (F-RTO, RFC 5682, 3.1). Linux then believes all the rest to be under
//! way still, far more than its window, and sends nothing until a timeout as long as the outage. So what
//! was sent before is acknowledged in order only.

use std::time::Duration;

use dibs_wire::SeqNumber;
use dibs_wire::frame::TcpFields;
use dibs_wire::packet::{Segment, flags};
use smallvec::SmallVec;

use crate::tcp_fields::{forget_sacks, timestamps};
use crate::time::Time;

/// Acknowledgements are not kept back for longer.
const PATIENCE: Duration = Duration::from_secs(1);
/// By then every end has sent anew, or has nothing to send.
const OVER: Duration = Duration::from_secs(10);

/// A connection after an outage.
#[derive(Debug)]
pub struct EchoFilter {
    /// Bytes that the local kernel has sent and that nobody has acknowledged to it.
    outstanding: u32,
    /// The kernel's clock since the outage.
    tsval: Option<u32>,
    /// Up to where the kernel's bytes are acknowledged, as long as it has to be made to send again.
    acked: Option<SeqNumber>,
    /// What the kernel had sent before this daemon started ends here.
    end: Option<SeqNumber>,
    /// The kernel has still to say where it stands.
    asked: bool,
    /// It has sent again by itself, and waits for an acknowledgement.
    sent: bool,
    /// When the first segment was adapted.
    since: Option<Time>,
}

impl EchoFilter {
    /// This daemon has just started; the kernel has `outstanding` bytes under way, and is asked where
    /// it stands.
    pub const fn anew(outstanding: u32) -> Self {
        Self {
            outstanding,
            tsval: None,
            acked: None,
            end: None,
            asked: true,
            sent: false,
            since: None,
        }
    }

    /// This daemon was there all the time: what the kernel sent again waits here. `tsval` is the
    /// latest that it sent.
    pub const fn after(tsval: u32) -> Self {
        Self {
            outstanding: 0,
            tsval: Some(tsval),
            acked: None,
            end: None,
            asked: false,
            sent: false,
            since: None,
        }
    }

    /// A segment of the local kernel: without payload it stands behind all that was sent.
    pub fn note(&mut self, segment: &Segment<'_>) {
        if !segment.payload.is_empty() {
            self.acked = None;
            self.sent = true;
        } else if self.asked && segment.has(flags::ACK) {
            self.asked = false;
            self.tsval = segment.timestamps.map(|(tsval, _)| tsval);
            let acked = segment.seq.add(self.outstanding.wrapping_neg());
            self.acked = (!self.sent).then_some(acked);
            self.end = Some(segment.seq);
        }
    }

    /// Adapts a segment for the local kernel; true once there is nothing to adapt any more.
    fn adapt<'a>(
        &mut self,
        now: Time,
        tcp: &mut TcpFields<'a>,
        scratch: &'a mut SmallVec<[u8; 64]>,
    ) -> bool {
        if self.asked {
            return false;
        }
        let after = now.since(*self.since.get_or_insert(now));
        let fresh = match self.tsval.zip(timestamps(tcp)) {
            Some((tsval, (_, echoed))) => echoed.wrapping_sub(tsval) as i32 >= 0,
            // Without time stamps nothing is measured by what was sent twice.
            None => self.acked.is_none(),
        };
        let behind = self.end.is_some_and(|end| end.is_after(tcp.ack));
        if fresh && !behind || after >= OVER || tcp.flags & flags::ACK == 0 {
            return true;
        }
        if let Some(acked) = self.acked
            && !fresh
            && after < PATIENCE
            && tcp.ack.is_after(acked)
        {
            tcp.ack = acked;
        }
        // RFC 7323, 3.2: a zero echoes nothing.
        let end = self.end.unwrap_or(tcp.ack);
        forget_sacks(tcp, end, (!fresh).then_some(0), scratch);
        false
    }
}

/// Adapts a segment of the peer's kernel for the local one, as long as that is called for.
pub fn adapt<'a>(
    filter: &mut Option<Box<EchoFilter>>,
    now: Time,
    tcp: &mut TcpFields<'a>,
    scratch: &'a mut SmallVec<[u8; 64]>,
) {
    if let Some(known) = filter
        && known.adapt(now, tcp, scratch)
    {
        *filter = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dibs_wire::packet::{FlowKey, IpMeta};
    use std::net::IpAddr;

    const MS: Duration = Duration::from_millis(1);

    fn answer(seq: u32, tsval: u32) -> Segment<'static> {
        Segment {
            tuple: FlowKey::tcp(
                (IpAddr::from([10, 0, 1, 1]), 1),
                (IpAddr::from([10, 0, 1, 2]), 2),
            ),
            meta: IpMeta::default(),
            seq: SeqNumber::new(seq),
            ack: SeqNumber::new(9),
            flags: flags::ACK,
            window: 1,
            urgent: 0,
            timestamps: Some((tsval, 1)),
            options: &[],
            payload: &[],
            payload_at: 0,
        }
    }

    fn ack(number: u32, echoed: u32) -> TcpFields<'static> {
        TcpFields {
            flags: flags::ACK,
            window: 1,
            ack: SeqNumber::new(number),
            timestamps: Some((77, echoed)),
            meta: None,
            options: None,
            urgent: None,
        }
    }

    fn adapted(
        filter: &mut Option<Box<EchoFilter>>,
        at: Duration,
        tcp: TcpFields<'_>,
    ) -> (u32, u32) {
        let mut scratch = SmallVec::new();
        let mut tcp = tcp;
        adapt(filter, Time::ZERO + at, &mut tcp, &mut scratch);
        (tcp.ack.raw(), timestamps(&tcp).unwrap().1)
    }

    #[test]
    fn old_echoes_acknowledge_nothing_new_until_the_kernel_has_sent_again() {
        let mut filter = Some(Box::new(EchoFilter::anew(5000)));
        assert_eq!(adapted(&mut filter, MS, ack(12_000, 400)), (12_000, 400));
        filter.as_mut().unwrap().note(&answer(15_000, 500));
        assert_eq!(adapted(&mut filter, MS, ack(12_000, 499)), (10_000, 0));
        assert_eq!(adapted(&mut filter, MS, ack(9000, 400)), (9000, 0));
        let mut again = answer(10_000, 510);
        again.payload = b"again";
        filter.as_mut().unwrap().note(&again);
        assert_eq!(adapted(&mut filter, MS, ack(12_000, 499)), (12_000, 0));
        assert_eq!(adapted(&mut filter, MS, ack(12_000, 500)), (12_000, 500));
        assert!(filter.is_some(), "not all that was sent before is there");
        assert_eq!(adapted(&mut filter, MS, ack(15_000, 511)), (15_000, 511));
        assert!(filter.is_none(), "it is over");
    }

    #[test]
    fn nothing_is_kept_back_from_a_kernel_that_has_sent_again_before_it_was_asked() {
        let mut filter = Some(Box::new(EchoFilter::anew(5000)));
        let mut again = answer(10_000, 499);
        again.payload = b"again";
        filter.as_mut().unwrap().note(&again);
        filter.as_mut().unwrap().note(&answer(15_000, 500));
        assert_eq!(adapted(&mut filter, MS, ack(12_000, 400)), (12_000, 0));
    }

    #[test]
    fn nothing_is_kept_back_for_long() {
        let mut filter = Some(Box::new(EchoFilter::anew(5000)));
        filter.as_mut().unwrap().note(&answer(2000, 500));
        let before = 2000u32.wrapping_sub(5000);
        assert_eq!(adapted(&mut filter, 5000 * MS, ack(1000, 9)), (before, 0));
        assert_eq!(adapted(&mut filter, 6000 * MS, ack(1000, 9)), (1000, 0));
        assert_eq!(adapted(&mut filter, 15_000 * MS, ack(1000, 9)), (1000, 9));
        assert!(filter.is_none());
    }

    #[test]
    fn who_was_there_all_the_time_only_measures_nothing() {
        let mut filter = Some(Box::new(EchoFilter::after(500)));
        assert_eq!(adapted(&mut filter, MS, ack(12_000, 499)), (12_000, 0));
        // Selective acknowledgements bring their options as they are.
        let tcp = with_sack(&SACK, 12_000);
        assert_eq!(adapted(&mut filter, MS, tcp), (12_000, 0));
        assert_eq!(adapted(&mut filter, MS, ack(12_000, 501)), (12_000, 501));
        assert!(filter.is_none());
    }

    /// TSval 5, TSecr 499, and bytes 14,000 to 15,000.
    const SACK: [u8; 24] = [
        1, 1, 8, 10, 0, 0, 0, 5, 0, 0, 1, 0xf3, 1, 1, 5, 10, 0, 0, 54, 176, 0, 0, 58, 152,
    ];

    fn with_sack(options: &[u8], number: u32) -> TcpFields<'_> {
        TcpFields {
            timestamps: None,
            options: Some(options),
            ..ack(number, 0)
        }
    }

    #[test]
    fn what_had_arrived_out_of_order_is_told_in_order() {
        let mut filter = Some(Box::new(EchoFilter::anew(5000)));
        filter.as_mut().unwrap().note(&answer(15_000, 490));
        let mut scratch = SmallVec::new();
        let mut tcp = with_sack(&SACK, 12_000);
        adapt(&mut filter, Time::ZERO + MS, &mut tcp, &mut scratch);
        assert_eq!(timestamps(&tcp), Some((5, 499)));
        assert_eq!(tcp.options.unwrap()[12..], [1; 12]);

        let mut filter = Some(Box::new(EchoFilter::anew(5000)));
        filter.as_mut().unwrap().note(&answer(14_000, 490));
        let mut scratch = SmallVec::new();
        let mut tcp = with_sack(&SACK, 13_000);
        adapt(&mut filter, Time::ZERO + MS, &mut tcp, &mut scratch);
        assert_eq!(tcp.options.unwrap()[14..], SACK[14..], "sent since");
    }
}
