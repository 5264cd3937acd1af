//! Proof that plain carries a connection before it leaves its bump for plain: a driver of [`dibs_switch::knock`].

use std::collections::BTreeMap;

use dibs_core::Time;
use dibs_switch::asking::Negotiation;
use dibs_switch::conns::Meant;
use dibs_switch::knock::{self, Knock, Numbers, Refusal};
use dibs_switch::messages::{Answer, Body, Named, Outcome};
use dibs_switch::naming::Query;
use dibs_wire::FlowKey;

use super::{About, At, Steering};
use crate::coverage::Seen;

/// Why a connection is to go to plain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// A user here chose so.
    Choice,
    /// Nothing keeps it on the bump of a rule that is gone.
    Rule,
}

/// Knocks under way.
#[derive(Debug, Default)]
pub(super) struct Knocking {
    /// Connections that are to go to plain.
    asks: BTreeMap<FlowKey, (Meant, Cause, Knock)>,
    /// For the peer, with the questions that are not answered yet.
    answers: BTreeMap<FlowKey, (Option<u32>, Knock)>,
}

impl Knocking {
    /// True if a connection is looked at here.
    pub(super) fn asks(&self, pair: &FlowKey) -> bool {
        self.asks.contains_key(pair)
    }

    /// True if any is.
    pub(super) fn asks_any(&self) -> bool {
        !self.asks.is_empty()
    }

    pub(super) fn forget(&mut self, pair: &FlowKey) {
        self.asks.remove(pair);
        self.answers.remove(pair);
    }

    /// When there is something to do.
    pub(super) fn next(&self) -> Option<Time> {
        let asks = self.asks.values().map(|(_, _, knock)| knock);
        let answers = self.answers.values().map(|(_, knock)| knock);
        asks.chain(answers).filter_map(Knock::due).min()
    }
}

impl Steering {
    /// Finds out whether plain carries a connection that is to go there.
    pub(super) fn knock(&mut self, at: &mut At<'_>, conn: Meant, cause: Cause) {
        let Some(own) = numbers(at, &conn.pair) else {
            return self.stay(at, conn, cause, Refusal::Unknown);
        };
        let knock = Knock::ask(at.now, own);
        let asks = &mut self.daemon().knocking.asks;
        asks.insert(conn.pair, (conn, cause, knock));
        self.ask(at, Query::new(conn), About::Knock(own));
        self.go_on_knocking(at);
    }

    /// The peer said whether it heard this host.
    pub(super) fn handle_knocked(&mut self, at: &mut At<'_>, pair: &FlowKey, answer: Answer) {
        if let Some((_, _, knock)) = self.daemon().knocking.asks.get_mut(pair) {
            knock.handle_answer(answer);
        }
        self.go_on_knocking(at);
    }

    /// The peer knocks.
    pub(super) fn on_knock(
        &mut self,
        at: &mut At<'_>,
        request: u32,
        (named, theirs): (Named, Numbers),
    ) {
        let pair = named.pair.reversed();
        let own = numbers(at, &pair);
        let refusal = match at.socket(&pair) {
            None => Some((Outcome::NoConnection, 0)),
            Some(socket) if socket != named.socket => Some((Outcome::OtherSocket, socket.0.into())),
            Some(_) if own.is_none() && self.mark(&pair).bump.is_some() => {
                Some((Outcome::Failed, 0))
            }
            Some(_) => None,
        };
        if let Some(refusal) = refusal {
            self.post(at, request, Body::Answer(vec![refusal]));
            return;
        }
        let knock = Knock::answer(at.now, own, theirs);
        let answers = &mut self.daemon().knocking.answers;
        answers.insert(pair, (Some(request), knock));
        self.go_on_knocking(at);
    }

    /// A packet came in by the ordinary route, whatever the kernel makes of it.
    pub fn on_plain(&mut self, at: &mut At<'_>, packet: &[u8]) {
        let Some((pair, numbers)) = knock::read(packet) else {
            return;
        };
        let Knocking { asks, answers } = &mut self.daemon().knocking;
        let asks = asks.get_mut(&pair).map(|(_, _, knock)| knock);
        let answers = answers.get_mut(&pair).map(|(_, knock)| knock);
        let knocks = asks.into_iter().chain(answers);
        knocks.for_each(|knock| knock.handle_heard(numbers, at.now));
        self.go_on_knocking(at);
    }

    /// Does what is due.
    pub(super) fn go_on_knocking(&mut self, at: &mut At<'_>) {
        let now = at.now;
        let Knocking { asks, answers } = &mut self.daemon().knocking;
        let mut sent = Vec::new();
        let of_asks = asks.iter_mut().map(|(pair, (_, _, knock))| (pair, knock));
        let of_answers = answers.iter_mut().map(|(pair, (_, knock))| (pair, knock));
        for (pair, knock) in of_asks.chain(of_answers) {
            while let Some(numbers) = knock.poll_send(now) {
                sent.extend(knock::packets(pair, numbers));
            }
        }
        let mut replies = Vec::new();
        answers.retain(|_, (request, knock)| {
            if let Some((asked, reply)) = request.zip(knock.reply(now)) {
                replies.push((asked, reply));
                *request = None;
            }
            request.is_some() || knock.due().is_some()
        });
        let done = asks.extract_if(.., |_, (_, _, knock)| knock.outcome(now).is_some());
        let done: Vec<(Meant, Cause, Knock)> = done.map(|(_, ask)| ask).collect();
        self.knocks.extend(sent);
        for (request, reply) in replies {
            self.post(at, request, Body::Answer(vec![reply]));
        }
        for (conn, cause, knock) in done {
            match (knock.outcome(now), cause) {
                (Some(Ok((Outcome::Done, _))), _) if !at.is_there(&conn) => {}
                (Some(Ok((Outcome::Done, _))), Cause::Choice) => {
                    self.seen.note(Seen::PlainProved);
                    self.choose_proved(at, conn, None);
                }
                (Some(Ok((Outcome::Done, _))), Cause::Rule) => {
                    self.seen.note(Seen::PlainProved);
                    let negotiation = Negotiation::by_rule(conn, None, self.host);
                    self.carry_on(at, negotiation);
                }
                (Some(answer), _) => self.stay(at, conn, cause, Refusal::Peer(answer)),
                (None, _) => unreachable!("it was just seen to be over"),
            }
        }
    }

    fn stay(&mut self, at: &At<'_>, conn: Meant, cause: Cause, why: Refusal) {
        self.seen.note(Seen::PlainRefused);
        let on = self.mark(&conn.pair).bump;
        if let (Cause::Rule, Some(bump)) = (cause, on) {
            let keep = |known: &mut dibs_switch::table::Conn| {
                known.keep_on(bump, why.answer(), at.now);
            };
            self.update(&conn.pair, keep);
        }
    }
}

/// Numbers of a connection, as far as the data path knows them.
fn numbers(at: &At<'_>, pair: &FlowKey) -> Option<Numbers> {
    let tuple: FlowKey = *pair;
    let conns = at.node.conns();
    let known = conns.iter().filter(|conn| conn.tuple == tuple);
    let known = known.filter_map(|conn| Some((conn.last_seen, conn.stands?)));
    let latest = known.max_by_key(|(seen, _)| *seen);
    latest.map(|(_, (sent_end, acked))| Numbers::of(sent_end, acked))
}
