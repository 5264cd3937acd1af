//! Going on at once after an outage.
//!
//! TCP doubles its timeouts while nobody answers, so a connection would go on long after the paths
//! do. An acknowledgement that says where the far kernel stands ends the wait: a kernel whose
//! retransmissions failed sends again at once. Nobody has to remember one: a kernel answers an
//! unacceptable segment with an empty one of its own (RFC 9293, 3.10.7.4). So after an outage each
//! daemon sends its own kernel such a segment, and what the kernel says goes the ordinary way. It
//! is fresh, also where neither daemon knows the connection any more, and its time stamp tells a
//! new daemon the floor of TSval before anything is injected.

use dibs_wire::SeqNumber;
use dibs_wire::frame::TcpFields;
use dibs_wire::packet::{IpMeta, Tuple, flags};

use super::dispatch::{Node, route};
use crate::flow::conn::Conn;
use crate::flow::echo_filter::EchoFilter;
use crate::flow::inject::Template;
use crate::time::Time;

/// Hop limit of a segment that has come from nowhere.
const TTL: u8 = 64;

impl Node {
    /// As [`solicit`](Self::solicit) for a connection that went on before this daemon started, of
    /// which the kernel has `outstanding` bytes under way. To be called before any path is up: what
    /// the kernel says waits until the peer is there.
    pub fn resume(&mut self, now: Time, bump: u8, tuple: Tuple, outstanding: u32) {
        let Self { shared, peers, .. } = self;
        let Some(peer) = route(peers, tuple.dst) else {
            return;
        };
        let key = peer.conn(now, shared, tuple, bump);
        let conn = peer.flows.get_mut(key).expect("it was just found");
        conn.echo_filter = Some(Box::new(EchoFilter::anew(outstanding)));
        self.solicit(bump, tuple);
    }

    /// Has the local kernel say by `bump` where a connection stands. `tuple` is as the local host
    /// sends; the connection has to exist, or the kernel answers with a reset.
    pub fn solicit(&mut self, bump: u8, tuple: Tuple) {
        let Self { shared, peers, .. } = self;
        let Some(peer) = route(peers, tuple.dst) else {
            return;
        };
        let template = Template {
            bump,
            tuple: tuple.reversed(),
            meta: IpMeta {
                ttl: TTL,
                ..IpMeta::default()
            },
        };
        let conn = peer.flows.find(tuple, bump);
        let conn = conn.and_then(|key| peer.flows.get(key));
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
            injector.empty_segment(pool, template, seq, &tcp, &mut None);
        }
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
