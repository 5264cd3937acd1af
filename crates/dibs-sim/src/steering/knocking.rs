//! Proof that plain carries a connection before it leaves its bump for plain: a driver of [`dibs_switch::knock`].

use dibs_wire::FlowKey;
use std::collections::BTreeMap;

use dibs_core::Time;
use dibs_switch::conns::Meant;
use dibs_switch::engine::rules::Kept;
use dibs_switch::engine::{Machine as _, asks};
use dibs_switch::knock::{self, Knock, Numbers, Refusal};
use dibs_switch::messages::{Body, Named, Outcome};

use super::host::Host;
use super::machine::Live;
use crate::coverage::Seen;

/// Knocks under way, of connections that are to go to plain here (true), and for the peer.
#[derive(Debug, Default)]
pub(super) struct Knocks(BTreeMap<(FlowKey, bool), Knock>);

impl Knocks {
    pub(super) fn forget(&mut self, pair: &FlowKey) {
        self.0.retain(|(known, _), _| known != pair);
    }

    /// When there is something to do.
    pub(super) fn due(&self) -> Option<Time> {
        self.0.values().filter_map(Knock::due).min()
    }

    /// An acknowledgement arrived in plain; whether anybody waits for one of its connection.
    pub(super) fn handle_heard(&mut self, pair: &FlowKey, numbers: Numbers, now: Time) -> bool {
        let mut any = false;
        for asks in [true, false] {
            if let Some(knock) = self.0.get_mut(&(*pair, asks)) {
                knock.handle_heard(numbers, now);
                any = true;
            }
        }
        any
    }

    /// Packets that are to be sent by now. What nobody waits for any more is forgotten once it has been sent.
    pub(super) fn handle_timeout(&mut self, now: Time) -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        self.0.retain(|(pair, asks), knock| {
            while let Some(numbers) = knock.poll_send(now) {
                packets.extend(knock::packets(pair, numbers));
            }
            *asks || knock.due().is_some() || knock.reply(now).is_none()
        });
        packets
    }
}

impl Host {
    /// Finds out which of these connections plain does not carry, and why.
    pub(super) async fn knock_for(&self, lives: &[Live]) -> Kept {
        let mut refused = Kept::new();
        let mut asked: Vec<(Meant, Numbers)> = Vec::new();
        for Live(conn) in lives {
            match self.numbers(&conn.pair).await {
                Some(own) => asked.push((*conn, own)),
                None => drop(refused.insert(conn.pair, Refusal::Unknown)),
            }
        }
        let now = self.now();
        let begun = { asked.iter() }.map(|(conn, own)| ((conn.pair, true), Knock::ask(now, *own)));
        self.knocks(|knocks| knocks.0.extend(begun));
        let body = |named: &[(usize, Named)]| {
            let conns = named.iter().map(|(index, named)| (*named, asked[*index].1));
            Body::Knock(conns.collect())
        };
        let meant: Vec<Meant> = asked.iter().map(|(conn, _)| *conn).collect();
        let answers = asks::ask_about(self, 0, &meant, body).await;
        for (conn, answer) in meant.iter().zip(answers) {
            self.knocks(|knocks| {
                if let Some(knock) = knocks.0.get_mut(&(conn.pair, true)) {
                    knock.handle_answer(answer);
                }
            });
        }
        for conn in meant {
            let key = (conn.pair, true);
            let outcome = self.until(|| {
                self.knocks(|knocks| match knocks.0.get(&key) {
                    // The connection is over.
                    None => Some(Ok((Outcome::NoConnection, 0))),
                    Some(knock) => knock.outcome(self.now()),
                })
            });
            let outcome = outcome.await;
            self.knocks(|knocks| knocks.0.remove(&key));
            match outcome {
                Ok((Outcome::Done, _)) => self.note(Seen::PlainProved),
                outcome => drop(refused.insert(conn.pair, Refusal::Peer(outcome))),
            }
        }
        refused
    }

    /// Answers a peer that knocks.
    pub(super) async fn hear_knock(
        &self,
        pair: FlowKey,
        theirs: Numbers,
        is_bumped: bool,
    ) -> Option<(Outcome, u64)> {
        let own = self.numbers(&pair).await;
        if own.is_none() && is_bumped {
            return None;
        }
        let key = (pair, false);
        self.knocks(|knocks| knocks.0.insert(key, Knock::answer(self.now(), own, theirs)));
        let reply = self.until(|| {
            self.knocks(|knocks| match knocks.0.get_mut(&key) {
                None => Some((Outcome::NoConnection, 0)),
                Some(knock) => knock.reply(self.now()),
            })
        });
        Some(reply.await)
    }

    /// Numbers of a connection, as far as the data path knows them.
    async fn numbers(&self, pair: &FlowKey) -> Option<Numbers> {
        let conns = self.listed().await;
        let known = conns.iter().filter(|conn| conn.tuple == *pair);
        let known = known.filter_map(|conn| Some((conn.last_seen, conn.stands?)));
        let latest = known.max_by_key(|(seen, _)| *seen);
        latest.map(|(_, (sent_end, acked))| Numbers::of(sent_end, acked))
    }
}
