//! What the peer says that it has.

use crate::chunk::Content;
use crate::counters::Counter;
use crate::node::peer::Peer;
use crate::node::shared::Shared;
use crate::path::AckFrame;
use crate::slab::Key;
use crate::time::Time;

impl Peer {
    pub(super) fn take_ack(&mut self, now: Time, shared: &mut Shared, at: usize, bytes: &[u8]) {
        let Ok(ack) = AckFrame::decode(bytes) else {
            return shared.count(Counter::FrameMalformed);
        };
        let link = &mut self.paths[at];
        let mut acked = std::mem::take(&mut shared.scratch.acked);
        let mut lost = std::mem::take(&mut shared.scratch.lost);
        if link.path.on_ack(now, &ack, &mut acked, &mut lost).is_err() {
            shared.count(Counter::AckRefused);
        }
        let id = link.id;
        let mut confirmed = None;
        for token in acked.drain(..) {
            let Some(key) = crate::node::send::key_of(token) else {
                continue;
            };
            if let Some(pending) = self.in_flight.get(key)
                && let Content::Chunk(chunk) = &pending.content
            {
                let head = self.in_flight.head(chunk);
                let of = (head.conn, head.strand.incarnation);
                if confirmed != Some(of) {
                    confirmed = Some(of);
                    self.confirm(of.0, of.1);
                }
            } else if let Some(Content::Share(share)) = self.in_flight.get(key).map(|p| &p.content)
                && share.opens
            {
                let head = self.in_flight.head_of_share(share);
                let (conn, incarnation) = (head.conn, head.strand.incarnation);
                self.confirm_share(shared, conn, incarnation, share.set);
            }
            let Some(pending) = self.in_flight.remove(key, &mut shared.pool) else {
                continue;
            };
            match pending.content {
                Content::Opened {
                    conn,
                    incarnation,
                    set,
                } => match set {
                    None => self.confirm(conn, incarnation),
                    Some(set) => self.confirm_share(shared, conn, incarnation, set),
                },
                Content::Control(_) => self.messages.on_acked(),
                Content::Share(_) | Content::Chunk(_) | Content::Fragment { .. } => {}
            }
        }
        self.take_lost(shared, id, &mut lost);
        shared.scratch.acked = acked;
        shared.scratch.lost = lost;
    }

    pub(super) fn confirm_share(&mut self, shared: &Shared, conn: Key, incarnation: u16, set: u32) {
        if let Some(conn) = self.flows.get_mut(conn)
            && conn.out.stream.incarnation() == incarnation
            && let Some(split) = shared.bumps.of(conn.bump).split()
        {
            conn.out.confirm_share(set, split.needed());
        }
    }

    pub(super) fn confirm(&mut self, conn: Key, incarnation: u16) {
        if let Some(conn) = self.flows.get_mut(conn)
            && conn.out.stream.incarnation() == incarnation
        {
            conn.out.confirm();
        }
    }
}
