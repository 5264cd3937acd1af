//! Keeps a kernel from discarding what was held back.
//!
//! While bytes wait for what lies in front of them, acknowledgements pass them. Linux discards a segment, bytes and
//! all, that acknowledges less than a window before the latest (RFC 5961, 5.2). So what is handed on late
//! acknowledges no less than what was handed on before it.

use dibs_wire::SeqNumber;
use dibs_wire::frame::TcpFields;
use dibs_wire::packet::flags;
use smallvec::SmallVec;

use crate::tcp_fields::{forget_sacks, is_behind, timestamps};

/// The latest acknowledgement that the local kernel was given.
#[derive(Clone, Copy, Debug, Default)]
pub struct AckFloor(Option<Given>);

#[derive(Clone, Copy, Debug)]
struct Given {
    ack: SeqNumber,
    window: u16,
    /// When it was sent, by the peer's kernel's clock. What was sent before is late; what was sent after it and
    /// acknowledges less is of another connection with the same ends.
    tsval: u32,
}

impl AckFloor {
    /// Takes note of the next segment for the local kernel; true if it lies behind. `sent_end` is where the kernel's
    /// own bytes end: what acknowledges more is the kernel's to refuse. Without time stamps nothing is told.
    #[inline]
    pub fn hear(&mut self, tcp: &TcpFields<'_>, sent_end: Option<SeqNumber>) -> bool {
        let Some((tsval, _)) = timestamps(tcp) else {
            return false;
        };
        if tcp.flags & flags::ACK == 0 {
            return false;
        }
        let late = |given: Given| given.ack.is_after(tcp.ack) && !is_behind(given.tsval, tsval);
        if self.0.is_some_and(late) {
            return true;
        }
        if sent_end.is_some_and(|end| !tcp.ack.is_after(end)) {
            self.0 = Some(Given {
                ack: tcp.ack,
                window: tcp.window,
                tsval,
            });
        }
        false
    }

    /// Number that it acknowledged.
    pub fn ack(self) -> Option<SeqNumber> {
        self.0.map(|given| given.ack)
    }

    /// The same once more, without time stamps.
    pub fn again(self) -> Option<TcpFields<'static>> {
        self.0.map(|given| TcpFields {
            flags: flags::ACK,
            window: given.window,
            ack: given.ack,
            timestamps: None,
            meta: None,
            options: None,
            urgent: None,
        })
    }

    /// Brings the fields of bytes that lie behind up to it, so that they say nothing new. `scratch` takes the changed options.
    pub fn raise<'a>(self, tcp: &mut TcpFields<'a>, scratch: &'a mut SmallVec<[u8; 64]>) {
        if let Some(given) = self.0 {
            (tcp.ack, tcp.window) = (given.ack, given.window);
            // Of what is acknowledged by now they would tell of a copy (RFC 2883).
            forget_sacks(tcp, given.ack, None, scratch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(tsval: u32, ack: u32, window: u16) -> TcpFields<'static> {
        TcpFields {
            flags: flags::ACK,
            window,
            ack: SeqNumber::new(ack),
            timestamps: Some((tsval, 1)),
            meta: None,
            options: Some(&[1, 1, 5, 10, 0, 0, 0, 2, 0, 0, 0, 4]),
            urgent: None,
        }
    }

    /// Acknowledgement, window and whether a selective one is left, as the kernel gets them.
    fn given(latest: &mut AckFloor, tcp: TcpFields<'_>, end: Option<u32>) -> (u32, u16, bool) {
        let (mut tcp, mut scratch) = (tcp, SmallVec::new());
        if latest.hear(&tcp, end.map(SeqNumber::new)) {
            latest.raise(&mut tcp, &mut scratch);
        }
        let sack = tcp.options.is_some_and(|options| options.contains(&5));
        (tcp.ack.raw(), tcp.window, sack)
    }

    #[test]
    fn what_comes_late_acknowledges_no_less() {
        let mut latest = AckFloor::default();
        let mut given = |tcp| given(&mut latest, tcp, Some(9));
        assert_eq!(given(fields(1, 1, 7)), (1, 7, true));
        assert_eq!(given(fields(3, 9, 5)), (9, 5, true));
        assert_eq!(given(fields(2, 1, 7)), (9, 5, false));
        assert_eq!(given(fields(3, 1, 7)), (9, 5, false), "in the same tick");
        assert_eq!(given(fields(4, 9, 6)), (9, 6, true));
        assert_eq!(given(fields(u32::MAX, u32::MAX, 7)), (9, 6, false));
    }

    #[test]
    fn a_new_connection_with_the_same_ends_acknowledges_what_it_likes() {
        let mut latest = AckFloor::default();
        assert_eq!(given(&mut latest, fields(3, 9, 5), Some(9)).0, 9);
        assert_eq!(given(&mut latest, fields(4, 1, 7), Some(9)), (1, 7, true));
        assert_eq!(given(&mut latest, fields(4, 2, 7), Some(9)), (2, 7, true));
    }

    #[test]
    fn what_the_kernel_has_not_sent_raises_nothing() {
        let mut latest = AckFloor::default();
        for end in [None, Some(8)] {
            assert_eq!(given(&mut latest, fields(3, 9, 5), end), (9, 5, true));
            assert_eq!(given(&mut latest, fields(2, 1, 7), end), (1, 7, true));
        }
    }

    #[test]
    fn without_time_stamps_nothing_is_told() {
        let mut latest = AckFloor::default();
        let plain = |ack| TcpFields {
            timestamps: None,
            ..fields(0, ack, 7)
        };
        assert_eq!(given(&mut latest, plain(9), Some(9)).0, 9);
        assert_eq!(given(&mut latest, plain(1), Some(9)), (1, 7, true));
    }
}
