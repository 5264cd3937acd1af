//! Going on at once after an outage.
//!
//! TCP doubles its timeouts while nobody answers, so a connection would go on long after the paths
//! do. An acknowledgement that says where the far kernel stands ends the wait: a kernel whose
//! retransmissions failed sends again at once. Nobody has to remember one: a kernel answers an
//! unacceptable segment with an empty one of its own (RFC 9293, 3.10.7.4). So after an outage each
//! daemon sends its own kernel such a segment, and what the kernel says goes the ordinary way. It
//! is fresh, also where neither daemon knows the connection any more, and its time stamp tells a
//! new daemon the floor of TSval before anything is injected.

use dibs_settings::BumpId;
use dibs_wire::SeqNumber;
use dibs_wire::frame::TcpFields;
use dibs_wire::packet::{FlowKey, IpMeta, flags};

use super::shared::Shared;
use crate::flow::conn::Conn;
use crate::flow::inject::Template;
use crate::flow::tsval_floor::TsvalFloor;

/// Hop limit of a segment that has come from nowhere.
const TTL: u8 = 64;

/// Injects, by a bump, segments that the local kernel answers with where a connection stands, of which this much is
/// known here. `tuple` is as the local host sends.
pub(super) fn solicit(shared: &mut Shared, bump: BumpId, tuple: FlowKey, conn: Option<&Conn>) {
    let template = Template {
        bump,
        tuple: tuple.reversed(),
        meta: IpMeta {
            ttl: TTL,
            ..IpMeta::default()
        },
    };
    for (seq, ack) in unacceptable(conn) {
        let tcp = TcpFields {
            flags: flags::ACK,
            window: 0,
            ack,
            timestamps: None,
            meta: None,
            options: None,
            urgent: None,
        };
        let (injector, pool) = (&mut shared.injector, &mut shared.pool);
        injector.empty_segment(pool, template, seq, &tcp, &mut TsvalFloor::default());
    }
}

/// Numbers of segments of which the local kernel finds at least one outside its window: the byte
/// before its window where that is known, as a keepalive has it, so that a firewall that follows
/// the numbers lets it pass. Without time stamps there is nothing else that it could object to.
fn unacceptable(conn: Option<&Conn>) -> impl Iterator<Item = (SeqNumber, SeqNumber)> {
    let known = conn.and_then(|conn| conn.acked.zip(conn.sent_end));
    let (first, second) = match known {
        Some((acked, sent)) => ((acked.add(u32::MAX), sent), None),
        // No window is as long as the half of all numbers.
        None => {
            let zero = SeqNumber::new(0);
            ((zero, zero), Some((SeqNumber::new(1 << 31), zero)))
        }
    };
    std::iter::once(first).chain(second)
}
