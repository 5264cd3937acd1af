//! Keeps a kernel from discarding what was held back.
//!
//! While bytes wait for what lies in front of them, acknowledgements pass them. Linux discards a segment, bytes and
//! all, that acknowledges less than a window before the latest (RFC 5961, 5.2). So what is handed on late
//! acknowledges no less than what was handed on before it.

use dibs_wire::SeqNumber;
use dibs_wire::frame::TcpFields;
use dibs_wire::packet::flags;
use smallvec::SmallVec;

use super::fields::forget_sacks;

/// The latest acknowledgement that the local kernel was given, with its window.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latest(Option<(SeqNumber, u16)>);

impl Latest {
    /// Takes note of the next segment for the local kernel; true if it lies behind. `sent_end` is where the kernel's
    /// own bytes end: what acknowledges more is the kernel's to refuse.
    #[inline]
    pub fn hear(&mut self, tcp: &TcpFields<'_>, sent_end: Option<SeqNumber>) -> bool {
        if tcp.flags & flags::ACK == 0 {
            return false;
        }
        if self.0.is_some_and(|(ack, _)| ack.is_after(tcp.ack)) {
            return true;
        }
        if sent_end.is_some_and(|end| !tcp.ack.is_after(end)) {
            self.0 = Some((tcp.ack, tcp.window));
        }
        false
    }

    /// Brings the fields of bytes that lie behind up to it, so that they say nothing new. `scratch` takes the changed options.
    pub fn raise<'a>(self, tcp: &mut TcpFields<'a>, scratch: &'a mut SmallVec<[u8; 64]>) {
        if let Some((ack, window)) = self.0 {
            (tcp.ack, tcp.window) = (ack, window);
            // Of what is acknowledged by now they would tell of a copy (RFC 2883).
            forget_sacks(tcp, ack, None, scratch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(ack: u32, window: u16) -> TcpFields<'static> {
        TcpFields {
            flags: flags::ACK,
            window,
            ack: SeqNumber::new(ack),
            timestamps: None,
            meta: None,
            options: Some(&[1, 1, 5, 10, 0, 0, 0, 2, 0, 0, 0, 4]),
            urgent: None,
        }
    }

    /// Acknowledgement, window and whether a selective one is left, as the kernel gets them.
    fn given(latest: &mut Latest, tcp: TcpFields<'_>, end: Option<u32>) -> (u32, u16, bool) {
        let (mut tcp, mut scratch) = (tcp, SmallVec::new());
        if latest.hear(&tcp, end.map(SeqNumber::new)) {
            latest.raise(&mut tcp, &mut scratch);
        }
        let sack = tcp.options.is_some_and(|options| options.contains(&5));
        (tcp.ack.raw(), tcp.window, sack)
    }

    #[test]
    fn what_comes_late_acknowledges_no_less() {
        let mut latest = Latest::default();
        assert_eq!(given(&mut latest, fields(1, 7), Some(9)), (1, 7, true));
        assert_eq!(given(&mut latest, fields(9, 5), Some(9)), (9, 5, true));
        assert_eq!(given(&mut latest, fields(1, 7), Some(9)), (9, 5, false));
        assert_eq!(given(&mut latest, fields(9, 6), Some(9)), (9, 6, true));
        assert_eq!(given(&mut latest, fields(u32::MAX, 7), Some(9)).0, 9);
    }

    #[test]
    fn what_the_kernel_has_not_sent_raises_nothing() {
        let mut latest = Latest::default();
        for end in [None, Some(8)] {
            assert_eq!(given(&mut latest, fields(9, 5), end), (9, 5, true));
            assert_eq!(given(&mut latest, fields(1, 7), end), (1, 7, true));
        }
    }
}
