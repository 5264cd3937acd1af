//! Keeps a kernel from sending more, by the windows of the acknowledgements that it is given.

use dibs_wire::SeqNumber;
use dibs_wire::frame::TcpFields;
use dibs_wire::packet::flags;

use super::numbers::MOST_APART;

/// Closes the window behind what a kernel has sent: all of it is acknowledged as ever, so that it has no
/// reason to think anything lost, but nothing may follow.
#[derive(Clone, Copy, Debug)]
pub struct WindowClamp {
    /// Behind the highest number that the kernel sent.
    edge: SeqNumber,
    scale: u8,
    /// The latest acknowledgement, with the window that it had.
    latest: Option<TcpFields<'static>>,
    /// The connection is taken to be silent.
    is_shut: bool,
}

impl WindowClamp {
    /// For a kernel that has sent up to `edge` and shifts windows by `scale`.
    pub const fn new(edge: SeqNumber, scale: u8) -> Self {
        Self {
            edge,
            scale,
            latest: None,
            is_shut: false,
        }
    }

    /// The connection is taken to be silent from now on. Once the kernel was given an acknowledgement of all that it sent, it sends
    /// nothing more by itself. One that got none by the bump has a window that nobody can close: what it sends is refused as well.
    pub fn shut(&mut self) {
        self.is_shut = true;
    }

    /// Number behind what the kernel sent before, if it sends up to `end` though its window is closed: it has one from another way than
    /// the bump, or does not know yet, and sends it once more after the switch. What lies further ahead than a window reaches is of another
    /// connection between the same ports, which began in plain.
    pub fn refuses(&self, end: SeqNumber) -> Option<SeqNumber> {
        let has_all = { self.latest }.is_none_or(|latest| !self.edge.is_after(latest.ack));
        let ahead = u32::try_from(end.distance_from(self.edge)).unwrap_or(0);
        (self.is_shut && has_all && ahead > 0 && ahead <= MOST_APART).then_some(self.edge)
    }

    /// The kernel sent more: what it had under way when the window closed.
    pub fn sent(&mut self, end: SeqNumber) {
        if end.is_after(self.edge) {
            self.edge = end;
        }
    }

    /// Closes the window of a segment for the kernel.
    pub fn limit(&mut self, tcp: &mut TcpFields<'_>) {
        if tcp.flags & flags::ACK == 0 || tcp.flags & (flags::SYN | flags::RST) != 0 {
            return;
        }
        if self
            .latest
            .is_none_or(|latest| !latest.ack.is_after(tcp.ack))
        {
            self.latest = Some(TcpFields {
                flags: flags::ACK,
                window: tcp.window,
                ack: tcp.ack,
                timestamps: tcp.timestamps,
                meta: tcp.meta,
                options: None,
                urgent: None,
            });
        }
        let under_way = u64::try_from(self.edge.distance_from(tcp.ack)).unwrap_or(0);
        // Rounded up: a window must not end before what was sent.
        let least = under_way.div_ceil(1 << self.scale.min(14));
        tcp.window = tcp.window.min(u16::try_from(least).unwrap_or(u16::MAX));
    }

    /// The segment that opens the window again, if it was closed.
    pub fn open(self) -> Option<TcpFields<'static>> {
        self.latest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(ack: u32, window: u16) -> TcpFields<'static> {
        TcpFields {
            flags: flags::ACK,
            window,
            ack: SeqNumber::new(ack),
            timestamps: Some((5, 6)),
            meta: None,
            options: None,
            urgent: None,
        }
    }

    #[test]
    fn a_window_ends_behind_what_was_sent() {
        let mut clamp = WindowClamp::new(SeqNumber::new(u32::MAX - 99), 7);
        clamp.sent(SeqNumber::new(1000));
        clamp.sent(SeqNumber::new(500));
        let mut tcp = ack(u32::MAX - 99, 900);
        clamp.limit(&mut tcp);
        assert_eq!(tcp.window, 9, "1100 bytes in units of 128, rounded up");
        let mut tcp = ack(1000, 900);
        clamp.limit(&mut tcp);
        assert_eq!(tcp.window, 0);
        // More than was seen: it went another way.
        let mut tcp = ack(2000, 900);
        clamp.limit(&mut tcp);
        assert_eq!(tcp.window, 0);
        // A closed one stays closed.
        let mut tcp = ack(900, 0);
        clamp.limit(&mut tcp);
        assert_eq!(tcp.window, 0);
        let open = clamp.open().unwrap();
        assert_eq!((open.ack, open.window), (SeqNumber::new(2000), 900));
    }

    #[test]
    fn nothing_more_is_taken_of_a_kernel_that_knows_its_window_closed() {
        let number = SeqNumber::new;
        let mut unheard = WindowClamp::new(number(1000), 0);
        let edge = Some(number(1000));
        assert_eq!(unheard.refuses(number(2000)), None);
        unheard.shut();
        assert_eq!(unheard.refuses(number(2000)), edge, "it cannot be closed");
        let mut clamp = WindowClamp::new(number(1000), 0);
        clamp.limit(&mut ack(900, 700));
        clamp.shut();
        assert_eq!(clamp.refuses(number(2000)), None, "some are under way");
        clamp.sent(number(1100));
        clamp.limit(&mut ack(1000, 700));
        assert_eq!(clamp.refuses(number(2000)), None, "some were");
        clamp.limit(&mut ack(1100, 700));
        let edge = Some(number(1100));
        assert_eq!(clamp.refuses(number(2000)), edge, "however late");
        assert_eq!(clamp.refuses(number(1100)), None, "this is sent again");
        assert_eq!(clamp.refuses(number(1101)), edge);
        assert_eq!(clamp.refuses(number(1100 + MOST_APART)), edge);
        let of_another = number(1101 + MOST_APART);
        assert_eq!(clamp.refuses(of_another), None);
    }

    #[test]
    fn what_is_no_acknowledgement_passes() {
        let mut clamp = WindowClamp::new(SeqNumber::new(0), 0);
        for flags in [flags::SYN | flags::ACK, flags::RST | flags::ACK, flags::RST] {
            let mut tcp = TcpFields { flags, ..ack(1, 9) };
            clamp.limit(&mut tcp);
            assert_eq!(tcp.window, 9);
        }
        assert!(clamp.open().is_none(), "nothing was closed");
    }
}
